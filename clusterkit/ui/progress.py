"""The progress of a run that `train` follows: a live display on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from clusterkit.common.text_plot import count, duration, shares, size, sparkline
from clusterkit.runs.final_evaluation import method_label
from clusterkit.runs.log.metrics import History, Record, number, score_name
from clusterkit.ui.run_status import (
    held_out_label,
    is_supervised,
    labelled_text,
    measured_text,
    to_go,
    warmup_label,
    warmup_text,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

WARMUP_LINE_SECONDS = 10.0
SHOWN_EVALUATIONS = 4
"""The first, which is made before training, and the newest ones."""


class Progress(Protocol):
    """Shows the progress of a run. It must never raise: that would stop the command from following the run."""

    def show(self, history: History, news: list[Record]) -> None:
        """Show the run; `news` are the records since the last call."""

    def say(self, text: str) -> None:
        """Show a message beside the progress."""


class Silent:
    """Shows only messages."""

    def show(self, history: History, news: list[Record]) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Print the message to stderr."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


class PlainLines(Silent):
    """One line per event, for logs and pipes."""

    def __init__(self) -> None:
        self._warmup_phase: object = None
        self._warmup_time = 0.0

    def show(self, history: History, news: list[Record]) -> None:
        """Print a line for every record that users need."""
        for record in news:
            line = self._warmup_line(record) if record["kind"] == "warmup" else event_line(record, history)
            if line:
                self.say(line)

    def _warmup_line(self, record: Record) -> str | None:
        when, phase = number(record, "time") or 0.0, (record.get("phase"), record.get("cached"))
        if phase == self._warmup_phase and when - self._warmup_time < WARMUP_LINE_SECONDS:
            return None
        self._warmup_phase, self._warmup_time = phase, when
        return warmup_text(record) if is_supervised(record) else f"warm-up: {warmup_text(record)}"


def event_line(record: Record, history: History) -> str | None:
    """Return one line about a record, or None if users do not need it."""
    step = record.get("global_step", "?")
    match record["kind"]:
        case "step":
            line = _step_line(record, history)
        case "eval" if record.get("name") == "heldout":
            line = f"held-out {measured_text(record)} ({record.get('num_tasks', '?')} tasks) after step {step}"
        case "eval":
            line = f"{record.get('name', 'held-out')}: {measured_text(record)}{_measured(record)}"
        case "recover":
            line = f"recover checkpoint after step {step} ({size(number(record, 'bytes'))})"
        case "save":
            line = f"checkpoint after step {step}: {record.get('path', '')}"
        case "warning":
            line = f"warning: {record.get('message', '')}"
        case "attempt" if history.is_before_first_step:
            line = "the trainer has loaded; held-out tasks are measured before step 1"
        case _:
            return None
    return line


def _step_line(record: Record, history: History) -> str:
    stats = record.get("stats") or {}
    name = "loss" if "loss" in stats else "task_reward"
    value = number(stats, name)
    return (
        f"step {record.get('global_step', '?')}/{history.total_steps or '?'}  "
        f"{name} {'?' if value is None else f'{value:.3f}'}  "
        f"{count(number(record, 'tokens_per_s'))} tokens/s  {duration(number(record, 'step_time_s'))}  "
        f"ETA {to_go(history, history.eta())}"
    )


def live_lines(history: History, now: float) -> list[str]:
    """Return the lines of the live display at `now` (Unix seconds)."""
    if not history.steps:
        if history.warmup:
            return [f"{warmup_label(history.warmup):<11}  {warmup_text(history.warmup, counted=False)}"]
        doing = "measuring held-out tasks before the first step" if history.attempts else "loading the trainer"
        return [f"starting     {doing}"]
    last = history.steps[-1]
    lines = [
        f"{name:<11}  {values[-1]:.3f}  {sparkline(values)}"
        for name in ("task_reward", "loss")
        if (values := history.stat(name))
    ]
    if measured := history.held_out:
        shown = measured if len(measured) <= SHOWN_EVALUATIONS else [measured[0], *measured[1 - SHOWN_EVALUATIONS :]]
        told = [f"step {one.get('global_step', '?')} {labelled_text(one)}" for one in shown]
        lines.append(f"{held_out_label(measured[-1]):<11}  {' → '.join(told)}")
    speed = f"{count(number(last, 'tokens_per_s'))} tokens/s, {duration(history.step_time())} a step"
    split = shares(history.time_split())
    lines.append(f"speed        {speed}{': ' + split if split else ''}")
    if history.recovers:
        recover = history.recovers[-1]
        age = duration(max(now - (number(recover, "time") or now), 0.0))
        lines.append(f"recover      checkpoint after step {recover.get('global_step', '?')}, {age} ago")
    if history.is_closing:
        name = score_name(*measured[-1:])
        lines.append(f"closing      measuring held-out {name}, {history.closing_text}")
    return lines


class LiveDisplay:
    """Redraws a few lines in place with rich."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._live = Live(console=Console(stderr=True), auto_refresh=False, redirect_stdout=False)
        self._live.start()

    def show(self, history: History, news: list[Record]) -> None:
        """Redraw; warnings stay above the display."""
        for record in news:
            if record["kind"] == "warning":
                self.say(f"warning: {record.get('message', '')}")
        with contextlib.suppress(OSError):  # the terminal may be gone
            self._live.update(self.drawing(history), refresh=True)

    def say(self, text: str) -> None:
        """Print above the display."""
        with contextlib.suppress(OSError):
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stop; the last drawing stays."""
        with contextlib.suppress(OSError):
            self._live.stop()

    def drawing(self, history: History) -> RenderableType:
        """Return a bar and a few lines."""
        head = Table.grid(padding=(0, 1))
        warming = history.warmup if not history.steps else None
        done = number(warming, "step") if warming else history.global_step
        total = (number(warming, "steps") if warming else history.total_steps) or 0
        left = number(warming, "remaining_s") if warming else history.eta()
        eta = "" if left is None else f"ETA {duration(left) if warming else to_go(history, left)}"
        bar = ProgressBar(total=total or 1, completed=done or 0, width=30)
        what = warmup_label(warming) if warming else "step"
        position = f"{what} {done or 0:.0f}/{total:.0f}" if total else ""
        head.add_row(Text(self._name, style="bold"), bar, Text(position), Text(eta))
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in live_lines(history, time.time())]
        return Group(head, *lines)


@contextlib.contextmanager
def showing(name: str, enabled: bool = True) -> Iterator[Progress]:
    """Yield the display that fits stderr; only messages if it is not `enabled`."""
    if not enabled:
        yield Silent()
    elif not sys.stderr.isatty():
        yield PlainLines()
    else:
        display = LiveDisplay(name)
        try:
            yield display
        finally:
            display.close()


def _measured(record: Record) -> str:
    if "loss" in record:
        return f" ({record.get('num_tasks', '?')} tasks)"
    lengths = [f"{record[unit]} {unit}" for unit in ("chunks", "documents") if record.get(unit)]
    where = f" at {lengths[0]}" if lengths else " as trained"
    if record.get("method"):
        where = f" with {method_label(str(record['method']))}{where if lengths else ''}"
    return f"{where}, memory blanked" if record.get("blank_memory") else where
