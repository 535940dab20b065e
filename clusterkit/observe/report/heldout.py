"""The part of a page to click through: held-out tasks section by section, memories before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from clusterkit.observe.report.source import Run
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trace.evidence import Held
from clusterkit.runs.trace.heldout import HeldoutTask, Reading, heldout_tasks
from clusterkit.runs.trace.heldout_view import score_text
from clusterkit.ui.markup import Html, join, json_data, tag
from trainer.errors import UserError

MOST_TASKS = 16
MOST_SECTIONS = 40
"""Of a task; those with gold sentences are among them."""
MOST_CHARACTERS = 3_000_000
"""Of all texts of a run, about, two thirds of them for memories: the more there are, the more each is cut."""
LONGEST, SHORTEST = 6000, 600
"""Characters of a section or a memory that are shown."""
AROUND = 200
"""Characters before and after a gold sentence that stay when a section is cut."""
LEFT_OUT = -1
"""In place of a gold sentence's number: a note on what is left out."""

Part = tuple[str, int]
"""Text, and the number of the gold sentence that it belongs to; 0: none."""


def heldout_of(runs: Sequence[Run]) -> Html | None:
    """Return the held-out tasks of each run; None if no run has recorded any."""
    found = [(run.name, markup) for run in runs if (markup := _markup(run.directory, _stamps(run.directory)))]
    if not found:
        return None
    return join(*(join(tag("h3", name) if len(runs) > 1 else None, markup) for name, markup in found))


def _stamps(run: RunDirectory) -> tuple[tuple[str, int, int], ...]:
    """Return what changes with the records of a run."""
    found = []
    for path in sorted((run.logs / "rollouts").glob("eval_*.jsonl.zst")):
        try:
            status = path.stat()
        except OSError:  # it is being removed
            continue
        found.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(found)


@lru_cache(maxsize=8)
def _markup(run: RunDirectory, stamps: tuple[tuple[str, int, int], ...]) -> Html | None:
    if not stamps:
        return None
    try:
        tasks = heldout_tasks(run)
    except UserError:  # a file is damaged: the page works without it, and `clusterkit trace` says so
        return None
    note = tag("noscript", tag("p", "This part needs scripts; clusterkit trace --heldout shows the same.", cls="quiet"))
    return tag("div", json_data(page_data(tasks)), note, cls="heldout clicked")


def page_data(tasks: Sequence[HeldoutTask]) -> dict[str, Any]:
    """Return what the script shows, with texts cut to what a page can hold."""
    shown = [(task, _chosen(task)) for task in tasks[:MOST_TASKS]]
    count = sum(len(places) for _, places in shown)
    longest = _within(MOST_CHARACTERS // 3, count)
    memories = sum(
        min(len(memory.text), longest)
        for task, places in shown
        for _, reading in task.readings()
        for place, memory in enumerate(reading.memories)
        if memory and place in places
    )
    limit = _within(MOST_CHARACTERS - memories, count)
    return {
        "tasks": [_task(task, places, limit, longest) for task, places in shown],
        "more": max(len(tasks) - MOST_TASKS, 0),
    }


def _within(characters: int, count: int) -> int:
    """Return how long each of `count` texts may be."""
    return min(max(characters // max(count, 1), SHORTEST), LONGEST)


def parts_of(text: str, marks: Sequence[tuple[int, int, int]], limit: int) -> list[Part]:
    """Return a section's text in parts, cut to about `limit` characters: its beginning, and what is around each mark.

    Args:
        marks: start and end of each gold sentence, and its number.
    """
    kept = [(0, len(text))]
    if len(text) > limit:
        around = [(max(start - AROUND, 0), min(end + AROUND, len(text))) for start, end, _ in marks]
        room = max(limit - sum(end - start for start, end in around), AROUND)
        kept = _merged([(0, room), *around])
    parts: list[Part] = []
    at = 0
    for start, end in kept:
        if start > at:
            parts.append((_left_out(start - at), LEFT_OUT))
        parts += _marked(text, marks, start, end)
        at = end
    if at < len(text):
        parts.append((_left_out(len(text) - at), LEFT_OUT))
    return parts


def _marked(text: str, marks: Sequence[tuple[int, int, int]], start: int, end: int) -> list[Part]:
    parts: list[Part] = []
    at = start
    for low, high, number in sorted(marks):
        first, last = max(low, at), min(high, end)
        if first >= last:
            continue
        parts += [(text[at:first], 0)] if first > at else []
        parts.append((text[first:last], number))
        at = last
    return [*parts, (text[at:end], 0)] if at < end else parts


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _left_out(count: int) -> str:
    return f"… {count:,} characters left out …"


def _chosen(task: HeldoutTask) -> list[int]:
    """Return the sections that are shown, from 0: those with gold sentences, the last, and the first ones."""
    count = len(task.sections)
    gold = [place.section - 1 for one in task.gold for place in one.places]
    wanted = dict.fromkeys([*gold, count - 1, *range(count)]) if count else {}
    return sorted(list(wanted)[:MOST_SECTIONS])


def _task(task: HeldoutTask, places: Sequence[int], limit: int, longest: int) -> dict[str, Any]:
    return {
        "id": task.task,
        "question": task.question,
        "answers": task.answers,
        "gold": [
            {"title": one.title, "text": one.sentence, "sections": [place.section for place in one.places]}
            for one in task.gold
        ],
        "sections": [_section(task, place, limit, longest) for place in places],
        "count": len(task.sections),
        "before": _reading(task.before),
        "after": _reading(task.after),
    }


def _section(task: HeldoutTask, place: int, limit: int, longest: int) -> dict[str, Any]:
    marks = [
        (at.start, at.end, number)
        for number, one in enumerate(task.gold, start=1)
        for at in one.places
        if at.section == place + 1
    ]
    return {
        "number": place + 1,
        "parts": parts_of(task.sections[place], marks, limit),
        "gold": [number for _, _, number in marks],
        **{name: _memory(reading, place, longest) for name, reading in task.readings()},
    }


def _memory(reading: Reading, place: int, longest: int) -> dict[str, Any] | None:
    memory = reading.memories[place] if place < len(reading.memories) else None
    if memory is None:
        return None
    text, left = memory.text[:longest], len(memory.text) - longest
    return {"text": text, "cut": _left_out(left) if left > 0 else "", **_has(memory.held)}


def _has(held: Held) -> dict[str, Any]:
    return {"answer": held.answer, "has": held.sentences}


def _reading(reading: Reading | None) -> dict[str, Any] | None:
    if reading is None:
        return None
    return {"answer": reading.answer[:LONGEST], "score": score_text(reading), "error": reading.error}
