"""Show a set-up: a live table on a terminal, a line per change elsewhere, and one summary at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from clusterkit.common.text_plot import columns, duration
from clusterkit.setup.model import HostReport, Report, State
from clusterkit.ui.width import fitted

MARKS = {
    State.WAITING: "·",
    State.RUNNING: "…",
    State.OK: "ok",
    State.CHANGED: "changed",
    State.PLANNED: "would change",
    State.FAILED: "FAILED",
    State.SKIPPED: "-",
}
COLOURS = {State.CHANGED: "yellow", State.PLANNED: "yellow", State.FAILED: "bold red", State.OK: "green"}


class Plain:
    """Prints a line whenever a step of a host begins, ends or goes on with another action."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], tuple[State, str]] = {}
        self._began = time.monotonic()

    def __call__(self, report: HostReport) -> None:
        """Print what is new in a row."""
        for step, state in report.states.items():
            detail = report.details.get(step, "")
            # Progress in bytes changes many times a second: print only its beginning and end.
            shown = (state, "" if detail.endswith("%") else detail)
            if self._shown.get((report.name, step)) == shown or state in {State.WAITING, State.OK, State.SKIPPED}:
                continue
            self._shown[report.name, step] = shown
            mark = MARKS[state] if state is not State.RUNNING else ""
            text = " ".join(part for part in (mark, detail) if part)
            if text:
                sys.stderr.write(f"{time.monotonic() - self._began:6.1f} s  {report.name}  {step}: {text}\n")
                sys.stderr.flush()

    def paused(self) -> AbstractContextManager[None]:
        """Do nothing: lines do not hide a question."""
        return nullcontext()


class Live:
    """Redraws the table in place."""

    def __init__(self, reports: Sequence[HostReport], steps: Sequence[str], live: Any) -> None:
        self._reports, self._steps, self._live = reports, steps, live

    def __call__(self, report: HostReport) -> None:  # noqa: ARG002 (the whole table is drawn)
        """Draw."""
        self._live.update(table(self._reports, self._steps, self._live.console.width))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Remove the table while a question is on the terminal."""
        self._live.stop()
        try:
            yield
        finally:
            self._live.start(refresh=True)


@contextmanager
def show(reports: Sequence[HostReport], steps: Sequence[str]) -> Iterator[Plain | Live]:
    """Yield what shows the rows: a table where stderr is a terminal, otherwise lines."""
    if not sys.stderr.isatty():
        yield Plain()
        return
    console = Console(stderr=True)
    first = table(reports, steps, console.width)
    with RichLive(first, console=console, refresh_per_second=8, transient=True) as live:
        yield Live(reports, steps, live)


def table(reports: Sequence[HostReport], steps: Sequence[str], width: int) -> Any:
    """Return the table of hosts and steps, and what each host does now; in few columns, the step of each host."""
    found = Table(box=None, pad_edge=False)
    mark = len(MARKS[State.CHANGED])
    if (
        max((len(report.name) for report in reports), default=0) + sum(max(len(step), mark) + 2 for step in steps)
        > width
    ):
        for heading in ("host", "step", "", ""):
            found.add_column(heading, overflow="ellipsis", no_wrap=True)
        for report in reports:
            found.add_row(report.name, *_present_step(report, steps))
        return found
    for heading in ("host", *steps, ""):
        found.add_column(heading, overflow="ellipsis", no_wrap=True)
    for report in reports:
        cells = [report.states.get(step, State.WAITING) for step in steps]
        now = next((report.details.get(s, "") for s in reversed(steps) if report.states.get(s) is State.RUNNING), "")
        found.add_row(report.name, *(Text(MARKS[c], style=COLOURS.get(c, "")) for c in cells), now)
    return found


def _present_step(report: HostReport, steps: Sequence[str]) -> tuple[str, Text, str]:
    """Return the step that a host is at, its number, its state, and what it does there."""
    done = [k for k, step in enumerate(steps) if report.states.get(step) in (State.OK, State.CHANGED, State.PLANNED)]
    busy = [k for k, step in enumerate(steps) if report.states.get(step) in (State.FAILED, State.RUNNING)]
    at = (busy or done[-1:] or [0])[0]
    state = report.states.get(steps[at], State.WAITING)
    return (
        f"{at + 1}/{len(steps)} {steps[at]}",
        Text(MARKS[state], style=COLOURS.get(state, "")),
        report.details.get(steps[at], "") if state is State.RUNNING else "",
    )


def _by_state(host: HostReport, steps: Sequence[str]) -> str:
    """Return the steps of a host by their state: "ok connect, check; changed docker"."""
    found: dict[State, list[str]] = {}
    for step in steps:
        found.setdefault(host.states.get(step, State.SKIPPED), []).append(step)
    marks = MARKS | {State.SKIPPED: "not done"}
    return "; ".join(f"{marks[state]} {', '.join(names)}" for state, names in found.items())


def summary(report: Report, steps: Sequence[str], *, dry: bool, width: int | None = None) -> str:
    """Return the closing text: the table without colour, every failure with its fix, and the totals.

    width: columns of the terminal; where the table is wider, a host's steps stand by their state. None: no limit.
    """
    rows = [["host", *steps]]
    rows += [
        [host.name, *(MARKS[host.states.get(step, State.SKIPPED)] for step in steps)] for host in report.hosts.values()
    ]
    lines = columns(rows)
    if width is not None and max(map(len, lines)) > width:
        lines = fitted(columns([[host.name, _by_state(host, steps)] for host in report.hosts.values()]), width).split(
            "\n"
        )
    if dry:
        lines.append("")
        for host in report.hosts.values():
            lines += [f"{host.name}: would {change}" for change in host.changes]
            if not host.changes and host.failure is None:
                lines.append(f"{host.name}: nothing to do")
    for host in report.failed:
        lines += ["", *failure_lines(host)]
    lines += ["", *report.notes]
    slowest = max((host.busy_seconds for host in report.hosts.values()), default=0.0)
    changes = f"{report.num_changes} change{'' if report.num_changes == 1 else 's'}"
    failed = f", {len(report.failed)} of {len(report.hosts)} hosts failed" if report.failed else ""
    lines.append(
        f"{changes}{' planned, nothing was written' if dry else ''}{failed}; {duration(report.wall_seconds)} "
        f"(slowest host's own work {duration(slowest)})"
    )
    return "\n".join(lines)


def failure_lines(host: HostReport) -> list[str]:
    """Return what happened on a host that failed: step, command, last lines, log, fix."""
    failure = host.failure
    assert failure is not None
    tries = f" (after {host.retries} further {'try' if host.retries == 1 else 'tries'})" if host.retries else ""
    lines = [f"{host.name} failed at {failure.step}{tries}: {failure.message}"]
    if failure.command:
        lines.append(f"  while: {failure.command}")
    lines += [f"  | {line}" for line in failure.lines]
    if failure.fix:
        lines += [f"  {line}" for line in f"next: {failure.fix}".splitlines()]
    if host.log:
        lines.append(f"  log: {host.log}")
    return lines
