"""A held-out task as text for the terminal: memories before and after training side by side, section by section."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from clusterkit.runs.trace.heldout import AFTER, BEFORE, HeldoutTask, MemoryAt, Reading
from clusterkit.runs.trace.view import cut, gold_lines

NARROWEST, WIDEST = 60, 100
BETWEEN = " | "
MOST_WORDS = 120
"""Of a memory, unless texts are not to be cut."""
_HEADINGS = {BEFORE: "before training", AFTER: "after training"}
_MISSING = {
    BEFORE: "There is no record from before the first step: this run began at another one's checkpoint, or was moved.",
    AFTER: "There is only the record from before the first step: the one of afterwards is written when the run ends.",
}


def heldout_lines(tasks: Sequence[HeldoutTask], number: int, width: int, full: bool = False) -> list[str]:
    """Return one task section by section, and below it which others there are."""
    task, width = tasks[number], min(max(width, NARROWEST), WIDEST)
    lines = [f"held-out task {number} of {len(tasks)}, {cut(task.task, True)}"]
    lines += _wrapped("question  ", cut(task.question, True), width)
    lines += _wrapped("gold      ", cut(" | ".join(task.answers), True), width)
    if task.gold:
        lines.append("gold sentences")
        lines += [part for line in gold_lines(task.gold, full) for part in _wrapped("", line, width, "      ")]
        if any(not one.places for one in task.gold):
            lines.append("  (one without a section is in none that was read)")
    lines += [_MISSING[name] for name, reading in ((BEFORE, task.before), (AFTER, task.after)) if reading is None]
    legend = "{+…+} is new since the section before; has: what the memory has of the answer and the gold sentences"
    lines += _wrapped("", legend, width)
    for place in range(len(task.sections)):
        lines += ["", *_section(task, place, width, full)]
    lines += ["", "answers"]
    longest = max((len(score_text(reading)) for _, reading in task.readings()), default=0)
    for name, reading in task.readings():
        lines += _wrapped(f"  {name:<7} {score_text(reading):<{longest}}   ", _shown(reading, full), width)
    if len(tasks) > 1:
        lines += ["", "tasks, before -> after"]
        lines += [_listed(place, one, width) for place, one in enumerate(tasks)]
    return lines


def score_text(reading: Reading | None) -> str:
    """Return what an answer is worth, by the name that the closing table has for it; "-" without a record."""
    return "-" if reading is None else f"{reading.score_name} {reading.score:.2f}"


def _section(task: HeldoutTask, place: int, width: int, full: bool) -> list[str]:
    here = [f"[{n}]" for n, one in enumerate(task.gold, start=1) if any(p.section == place + 1 for p in one.places)]
    stands = f", with {' and '.join(here)}" if here else ""
    lines = [f"section {place + 1} of {len(task.sections)}{stands}"]
    if task.sections[place]:
        lines += _wrapped("  read  ", cut(task.sections[place], full), width)
    readings = task.readings()
    column = (width - len(BETWEEN) * (len(readings) - 1)) // len(readings)
    columns = [_column(name, reading, place, column, full) for name, reading in readings]
    lines += [BETWEEN.join(f"{part:<{column}}" for part in row).rstrip() for row in zip_longest(*columns, fillvalue="")]
    return lines


def _column(name: str, reading: Reading, place: int, width: int, full: bool) -> list[str]:
    now = _at(reading, place)
    if now is None:
        return [_HEADINGS[name], "(not read: it failed)" if reading.error else "(not read)"]
    before = _at(reading, place - 1)
    marked, gone = changes(before.text if before else "", now.text)
    if not full and len(marked) > MOST_WORDS:
        more, marked = len(marked) - MOST_WORDS, marked[:MOST_WORDS]
        text = " ".join(marked)
        marked[-1] += "+}" if text.count("{+") > text.count("+}") else ""
        marked.append(f"… {more} more words (--full)")
    has = str(now.held)
    return [
        *textwrap.wrap(f"{_HEADINGS[name]}{f': has {has}' if has else ''}", width),
        *textwrap.wrap(" ".join(marked) or "(empty)", width),
        *([f"-{gone} word{'s' * (gone > 1)}"] if gone else []),
    ]


def _at(reading: Reading, place: int) -> MemoryAt | None:
    return reading.memories[place] if 0 <= place < len(reading.memories) else None


def changes(old: str, new: str) -> tuple[list[str], int]:
    """Return the words of a text with those marked that another lacks, and how many words of that one are gone."""
    was, words = cut(old, True).split(), cut(new, True).split()
    gone = 0
    for kind, low, high, start, end in SequenceMatcher(None, was, words, autojunk=False).get_opcodes():
        if kind != "equal":
            gone += high - low
            if end > start:
                words[start] = "{+" + words[start]
                words[end - 1] += "+}"
    return words, gone


def _shown(reading: Reading, full: bool) -> str:
    if reading.error:
        return f"failed: {cut(reading.error, full)}"
    return cut(reading.answer, full) or "(nothing)"


def _listed(number: int, task: HeldoutTask, width: int) -> str:
    scores = " -> ".join(f"{score_text(one):>8}" for one in (task.before, task.after))
    return f"{number:>4}  {scores}  {cut(task.question, True)}"[:width]


def _wrapped(label: str, text: str, width: int, further: str | None = None) -> list[str]:
    later = " " * len(label) if further is None else further
    return textwrap.wrap(text, width, initial_indent=label, subsequent_indent=later) or [label.rstrip()]
