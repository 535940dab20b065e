"""The part of a page to click through: trajectories of training steps, turn by turn, with the memory after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from clusterkit.observe.report.source import Run
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trace.model import Trace, TurnView, trace_of
from clusterkit.runs.trace.source import Record, read_groups, recorded_steps
from clusterkit.runs.trace.view import reward_text, verdict
from clusterkit.ui.markup import Html, join, json_data, tag
from trainer.errors import UserError

MOST_STEPS = 6
"""The first, the newest, and some at even distances between them."""
MOST_TASKS = 3
"""Of a step."""
MOST_SAMPLES = 8
"""Of a task's group; its best and its worst trajectory are among them."""
MOST_TURNS = 40
"""Of a trajectory, the last among them."""
MOST_CHARACTERS = 1_500_000
"""Of all texts of a run, about: the more there are, the more each is cut."""
LONGEST, SHORTEST = 4000, 300
"""Characters of a text."""


def rollouts_of(runs: Sequence[Run]) -> Html | None:
    """Return trajectories of each run; None if no run has recorded any."""
    found = []
    for run in runs:
        files = tuple((step, path, *_stamp(path)) for step, path in shown_files(run.directory))
        if markup := _markup(tuple(file for file in files if file[-1])):
            found.append((run.name, markup))
    if not found:
        return None
    return join(*(join(tag("h3", name) if len(runs) > 1 else None, markup) for name, markup in found))


def shown_files(run: RunDirectory) -> list[tuple[int, Path]]:
    """Return the recorded steps that a page shows, with their files."""
    steps = recorded_steps(run)
    last = len(steps) - 1
    places = {round(last * part / (MOST_STEPS - 1)) for part in range(MOST_STEPS)} if steps else set()
    return [(steps[at], run.logs / "rollouts" / f"step_{steps[at]}.jsonl.zst") for at in sorted(places)]


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes with a file; its size comes last, 0 where it was not brought from its cluster."""
    try:
        status = path.stat()
    except OSError:  # it is being removed
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _markup(files: tuple[tuple[int, Path, int, int], ...]) -> Html | None:
    steps = [(step, tasks) for step, path, changed, size in files if (tasks := _tasks(step, path, changed, size))]
    if not steps:
        return None
    note = tag("noscript", tag("p", "This part needs scripts; clusterkit trace shows the same.", cls="quiet"))
    return tag("div", json_data(page_data(steps)), note, cls="rollouts clicked")


@lru_cache(maxsize=32)
def _tasks(step: int, path: Path, changed: int, size: int) -> list[list[Trace]]:  # noqa: ARG001 (a new file is read)
    """Return the first tasks of a step; none where its file is damaged, which `clusterkit trace` tells."""
    try:
        groups = read_groups(path, most=MOST_TASKS)
        return [[trace_of(step, group, sample) for sample in _chosen(group)] for group in groups.values()]
    except (UserError, KeyError, TypeError, ValueError):
        return []


def _chosen(group: Sequence[Record]) -> list[int]:
    """Return the numbers of the samples that are shown."""
    order = sorted(range(len(group)), key=lambda at: float(group[at]["reward"]))
    first = list(range(len(group)))[: MOST_SAMPLES - 2]
    return sorted({*first, order[0], order[-1]})


def page_data(steps: Sequence[tuple[int, Sequence[Sequence[Trace]]]]) -> list[dict[str, Any]]:
    """Return what the script shows, with texts cut to what a page can hold.

    Args:
        steps: number of each step, and the trajectories of its tasks.
    """
    turns = [turn for _, tasks in steps for task in tasks for trace in task for turn in _shown(trace)]
    count = sum(bool(turn.chunk) + 1 + len(turn.calls) for turn in turns)
    limit = min(max(MOST_CHARACTERS // max(count, 1), SHORTEST), LONGEST)

    def cut(text: str) -> str:
        left = len(text) - limit
        return text if left <= 0 else f"{text[:limit]} … ({left:,} characters left out)"

    return [
        {"step": step, "tasks": [[_trajectory(trace, cut) for trace in task] for task in tasks]}
        for step, tasks in steps
    ]  # fmt: skip


def _shown(trace: Trace) -> list[TurnView]:
    return [*trace.turns[: MOST_TURNS - 1], *trace.turns[MOST_TURNS - 1 :][-1:]]


def _trajectory(trace: Trace, cut: Callable[[str], str]) -> dict[str, Any]:
    stores = {name: entries for name, entries in trace.memory.items() if entries}
    return {
        "task": trace.task,
        "sample": trace.sample,
        "reward": trace.reward,
        "group": trace.others,
        "error": cut(trace.error),
        "metrics": trace.metrics,
        "gold": [f"{one.title}: {one.sentence}" if one.title else one.sentence for one in trace.gold],
        "asked": [[cut(one.question), " | ".join(one.gold), cut(one.answer), one.score] for one in trace.asked],
        "turns": [_turn(turn, cut) for turn in _shown(trace)],
        "count": len(trace.turns),
        "memory": {
            name: [f"{key}  {cut(str(text))}" for key, text in entries.items()]
            if isinstance(entries, dict)
            else [cut(str(entries))]
            for name, entries in stores.items()
        },
    }


def _turn(turn: TurnView, cut: Callable[[str], str]) -> dict[str, Any]:
    return {
        "number": turn.number,
        "read": cut(turn.chunk),
        "wrote": cut(turn.response),
        "tokens": turn.memory_tokens,
        "reward": reward_text(turn),
        "held": str(turn.held or ""),
        "calls": [
            {"ok": call.ok, "did": call.did, "text": cut(call.content), "worth": verdict(call)} for call in turn.calls
        ],
    }
