"""The tables of a page: key numbers, settings that differ, restarts, checkpoints, warnings, final evaluation."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from clusterkit.common.origin import masked
from clusterkit.common.text_plot import count, duration, shares, size
from clusterkit.observe.report.source import Run, held_out_name
from clusterkit.runs.final_evaluation import (
    document_scores,
    method_label,
    read_summary,
    summary_rows,
    supervised_text,
)
from clusterkit.runs.log.metrics import Record, mapping, number, score_name
from clusterkit.runs.status import Status
from clusterkit.ui.interval_plot import Line, Point, interval_plot
from clusterkit.ui.markup import Html, join, table, tag
from clusterkit.ui.run_status import is_supervised, no_recover_text, to_go, warmup_text

AVERAGED = 20
"""The first and the latest reward are means of so many steps."""

LONG = 70
"""A fact with more characters takes the width of a phone."""

MOST_ROWS = 30
"""Most rows of a table; older ones are left out."""

CONTROLS = {"gold": 4, "rag": 2, "long_context": 3}
"""Ways to read that are drawn beside the memory, with their colours."""

_GLYPHS = {"running": "▶", "finished": "✓", "failed": "✗", "killed": "✗", "stalled": "‖", "interrupted": "■"}
_NOTHING = "-"

Fact = Callable[[Run, Status], object]


def badge(status: Status) -> Html:
    """Return the run's state with a sign and a colour."""
    return tag("span", f"{_GLYPHS.get(status.state, '·')} {status.state}", cls=f"badge {status.state}")


def key_numbers(runs: Sequence[Run], statuses: Sequence[Status]) -> Html:
    """Return a card per fact, or of several runs a table with one column each; without facts that no run has."""
    pairs = list(zip(runs, statuses, strict=True))
    facts = [(label.format(score=held_out_name(runs)), fact) for label, fact in FACTS]
    if len(pairs) == 1:
        some = facts if statuses[0].message else facts[1:]  # the heading has the state
        found = [(label, fact(*pairs[0])) for label, fact in some]
        cards = [tag("div", tag("dt", label), tag("dd", value), cls=_width(value)) for label, value in found if value]
        return tag("dl", *cards, cls="cards")
    rows: list[list[object]] = []
    for label, fact in facts:
        cells = [fact(run, status) for run, status in pairs]
        if fact is _held_out:
            cells = [cell and join(_own_name(run, runs), cell) for run, cell in zip(runs, cells, strict=True)]
        if any(cells):
            rows.append([label, *(cell or _NOTHING for cell in cells)])
    return table(["", *(run.name for run in runs)], rows, "facts")


def _width(value: object) -> str | None:
    return "long" if len(re.sub("<[^>]*>", "", str(value))) > LONG else None


def _value(value: str, note: str = "") -> Html:
    """Return what is read first, and what is read next."""
    return join(tag("b", value), tag("small", f" {note}") if note else None)


def _state(_: Run, status: Status) -> object:
    message = status.message.removeprefix(status.state).strip()
    return join(badge(status), f" {message}" if message else None)


def _step(run: Run, status: Status) -> Html:
    last = run.history.steps[-1] if run.history.steps else {}
    epoch = f"epoch {last['epoch']} of {last.get('epochs', '?')}" if last.get("epoch") else ""
    done, total = run.history.global_step, status.total_steps
    bar = tag("progress", value=min(done, total), max=total, aria_label="Steps that are done") if total else None
    return join(_value(f"{done} of {total or '?'}", epoch), bar)


def _remaining(_: Run, status: Status) -> str:
    return f"about {to_go(status.history, status.eta)}" if status.left is not None else ""


def _warmup(run: Run, _: Status) -> str:
    warmup = None if run.history.steps else run.history.warmup
    return warmup_text(warmup) if warmup and not is_supervised(warmup) else ""


def _supervised(run: Run, _: Status) -> str:
    warmup = None if run.history.steps else run.history.warmup
    if warmup and is_supervised(warmup):
        return warmup_text(warmup)
    return supervised_text(read_summary(run.directory) or {})


def _silence(_: Run, status: Status) -> str:
    return f"{duration(status.silence)} ago" if status.alive and status.silence is not None else ""


def _reward(run: Run, _: Status) -> object:
    values = run.history.stat("task_reward")
    if not values:
        return ""
    some = min(AVERAGED, max(len(values) // 2, 1))
    first, latest = sum(values[:some]) / some, sum(values[-some:]) / some
    steps = "step" if some == 1 else f"{some} steps"
    return _value(f"{latest:.3f}", f"latest {steps}; first {steps}: {first:.3f}; best step: {max(values):.3f}")


def _held_out(run: Run, _: Status) -> object:
    found = [
        (accuracy, record)
        for record in run.history.held_out
        if (accuracy := number(record, "accuracy")) is not None
    ]  # fmt: skip
    if not found:
        return ""
    best, latest = max(found, key=lambda pair: pair[0]), found[-1]
    return _value(
        f"{latest[0]:.1%}",
        f"at step {latest[1].get('global_step', '?')}; best {best[0]:.1%} at step {best[1].get('global_step', '?')}",
    )


def _own_name(run: Run, runs: Sequence[Run]) -> str:
    """Return what a run's held-out score is called, where runs beside it have others; else nothing."""
    name = held_out_name([run])
    return "" if name == held_out_name(runs) else f"{name} "


def _speed(run: Run, _: Status) -> object:
    speed = number(run.history.steps[-1], "tokens_per_s") if run.history.steps else None
    return _value(f"{count(speed)} tokens/s", f"{duration(run.history.step_time())} a step") if speed else ""


def _time(run: Run, _: Status) -> str:
    times = [number(step, "step_time_s") or 0.0 for step in run.history.steps]
    return f"{duration(sum(times))} in steps: {shares(run.history.time_split())}" if times else ""


def _checkpoint(facts: dict[str, Any], *, none: str = "none yet", counted: bool = False) -> str:
    if not facts["count"]:
        return none
    number_of_them = f"{facts['count']}, the latest " if counted else ""
    step = "" if facts["global_step"] is None else f"after step {facts['global_step']}, "
    return f"{number_of_them}{step}{size(number(facts, 'bytes'))}, {duration(facts['age_s'])} ago"


def _recover(_: Run, status: Status) -> str:
    return _checkpoint(status.checkpoint(status.history.recovers), none=no_recover_text(status))


def _saved(_: Run, status: Status) -> str:
    return _checkpoint(status.checkpoint(status.history.saves), counted=True)


def _restarts(run: Run, _: Status) -> str:
    lost = sum(restart.lost_steps for restart in run.restarts)
    return f"{len(run.restarts)}" + (f"; {lost} step{'s' * (lost > 1)} made again" if lost else "")


def _warnings(run: Run, _: Status) -> str:
    return str(len(run.warnings)) if run.warnings else ""


FACTS: tuple[tuple[str, Fact], ...] = (
    ("State", _state),
    ("Step", _step),
    ("Remaining", _remaining),
    ("Warm-up", _warmup),
    ("Supervised start", _supervised),
    ("Last record", _silence),
    ("Task reward", _reward),
    ("Held-out {score}", _held_out),
    ("Speed", _speed),
    ("Time", _time),
    ("Recover checkpoint", _recover),
    ("Kept checkpoints", _saved),
    ("Restarts", _restarts),
    ("Warnings", _warnings),
)


def different_settings(runs: Sequence[Run]) -> Html | None:
    """Return the settings in which the runs differ; None for one run."""
    if len(runs) < 2:
        return None
    settings = [run.settings() for run in runs]
    if not all(settings):
        return tag("p", "The settings of a run could not be read: its config.yaml is missing or damaged.")
    keys = [key for key in dict.fromkeys(key for one in settings for key in one) if key != "trial_name"]
    rows: list[list[object]] = [
        [key, *(one.get(key, "(absent)") for one in settings)]
        for key in keys
        if len({repr(one.get(key, "(absent)")) for one in settings}) > 1
    ]
    if not rows:
        return tag("p", f"{'Both' if len(runs) == 2 else 'All'} runs have the same settings.")
    return table(["setting", *(run.name for run in runs)], rows)


def all_settings(runs: Sequence[Run]) -> Html | None:
    """Return every setting of the runs, one column each; None if none can be read."""
    settings = [run.settings() for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    if not keys:
        return None
    rows: list[list[object]] = [[key, *(_text(one.get(key, "(absent)")) for one in settings)] for key in keys]
    field = tag(
        "input", type="search", placeholder="find a setting", aria_label="Find a setting", data_filter="settings"
    )
    return join(field, table(["setting", *(run.name for run in runs)], rows, "settings"))


def _text(value: object) -> str:
    return masked(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def origins(runs: Sequence[Run]) -> Html | None:
    """Return what the runs were made with, one column each: command, code, machine, versions; None if unknown."""
    found = [_origin(run.history.attempts[-1]) if run.history.attempts else {} for run in runs]
    labels = dict.fromkeys(label for one in found for label, value in one.items() if value)
    rows: list[list[object]] = [[label, *(one.get(label) or _NOTHING for one in found)] for label in labels]
    return table(["", *(run.name for run in runs)], rows) if rows else None


def _origin(attempt: Record) -> dict[str, object]:
    """Return what an attempt says of itself; older ones say less."""
    machine = mapping(attempt, "machine")
    gpus = machine.get("gpus")
    kinds = Counter(map(str, gpus if isinstance(gpus, list) else []))
    memory = number(machine, "memory_gib")
    parts = [
        machine.get("host"),
        machine.get("system"),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        f"{memory:.0f} GiB" if memory else None,
    ]
    return {
        "Command": tag("code", attempt["command"]) if attempt.get("command") else None,
        "Code": attempt.get("code"),
        "Machine": ", ".join(str(part) for part in parts if part),
        "GPUs": ", ".join(f"{number_of_them} x {name}" for name, number_of_them in kinds.items()),
        "Ranks": attempt.get("ranks"),
        "Threads of a rank": attempt.get("threads"),
        "Versions": ", ".join(f"{name} {version}" for name, version in mapping(attempt, "versions").items()),
        "Began": moment(number(attempt, "time")),
    }


def restarts(runs: Sequence[Run]) -> Html | None:
    """Return when attempts after the first began, and why; None if there are none."""
    rows: list[list[object]] = [
        [
            _named(run, f"attempt {restart.attempt}", runs),
            moment(restart.time),
            restart.resume_step,
            restart.lost_steps,
            restart.reason,
        ]
        for run in runs
        for restart in run.restarts[-MOST_ROWS:]
    ]
    header: list[object] = ["", "began", "from step", "steps made again", "the one before ended with"]
    return table(header, rows) if rows else None


def checkpoints(runs: Sequence[Run]) -> Html | None:
    """Return the newest persistent checkpoints; None if there are none."""
    rows: list[list[object]] = [
        [_named(run, f"step {save.get('global_step', '?')}", runs), moment(number(save, "time")), *_written(save)]
        for run in runs
        for save in run.history.saves[: -MOST_ROWS - 1 : -1]
    ]
    return table(["", "written", "size", "took", "path"], rows) if rows else None


def _written(save: Record) -> list[object]:
    return [size(number(save, "bytes")), duration(number(save, "seconds")), save.get("path", "")]


def warnings(runs: Sequence[Run]) -> Html | None:
    """Return the newest warnings; None if there are none."""
    rows: list[list[object]] = [
        [_named(run, moment(number(record, "time")), runs), record.get("message", "")]
        for run in runs
        for record in run.warnings[: -MOST_ROWS - 1 : -1]
    ]
    return table(["time", "message"], rows) if rows else None


def final_evaluation(runs: Sequence[Run]) -> Html | None:
    """Return the scores of finished runs before and after; None if no run has finished."""
    parts = []
    for run in runs:
        summary = read_summary(run.directory)
        if summary is not None:
            title = tag("p", tag("b", run.name)) if len(runs) > 1 else None
            heading, *rows = map(list, summary_rows(summary))
            parts.append(join(title, table(heading, rows, "closing"), _over_documents(summary)))
    return join(*parts) if parts else None


def _over_documents(summary: Record) -> Html | None:
    """Return the plot of scores over the number of documents; None where there is one number of them."""
    scores = document_scores(summary)
    kinds = {"before": ("before training", 1), "after": ("after training", 0)}
    kinds |= {name: (f"{method_label(name)}, after training", colour) for name, colour in CONTROLS.items()}
    kinds["blank"] = ("memory blanked, after training", 6)
    lines = [
        Line(text, colour, [Point(n, *score) for n, score in scores[name].items()], name == "blank", name in CONTROLS)
        for name, (text, colour) in kinds.items()
        if scores.get(name)
    ]
    if max(map(len, (scores["before"], scores["after"]))) < 2:
        return None
    title = f"Held-out {score_name(summary)} by the number of documents"
    plot = interval_plot(title, "documents", lines, logarithmic=True)
    return tag("div", plot, cls="grid-of-plots")


def moment(seconds: float | None) -> str:
    """Return Unix seconds as a readable time in UTC."""
    return "unknown" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _named(run: Run, text: str, runs: Sequence[Run]) -> str:
    return f"{run.directory.trial}: {text}" if len(runs) > 1 else text
