"""The end of a metrics.jsonl as a history: how a run is doing now, however long its file is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from clusterkit.runs.log.metrics import History, Record, records_of

TAIL_BYTES = (128 << 10, 1 << 20, 8 << 20)
"""How much of the end is read: the next more where a step is longer than that."""
SEARCHED_BYTES = 4 << 20
"""So far before the tail the last held-out evaluation is looked for: some runs evaluate every few hundred steps."""
EVALUATION = b'"kind": "eval"'


def newest_history(path: Path, *, evaluates: bool = True) -> tuple[History, int]:
    """Return what the end of a run's records tells, and how many damaged lines it has.

    It has the newest steps, the newest held-out evaluation and how the run ended. It is empty where there is no file.

    Args:
        path: metrics.jsonl.
        evaluates: the run evaluates between its first and last step, so that there is one to be looked for.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for most in TAIL_BYTES:
                begin = max(size - most, 0)
                lines = _read(file, begin, size).split(b"\n")[bool(begin) : -1]  # whole ones
                records, damaged = records_of(lines)
                history = history_of(records)
                if not begin or history.steps:
                    break
            if begin and evaluates and not history.held_out and (found := _last_evaluation(file, begin)):
                history = history_of([found, *records])
    except FileNotFoundError:
        return History(), 0
    return history, damaged


def history_of(records: list[Record]) -> History:
    """Return records as a history."""
    history = History()
    for record in records:
        history.add(record)
    return history


def _last_evaluation(file: BinaryIO, end: int) -> Record | None:
    """Return the last held-out evaluation that is recorded before a place in the file."""
    data = _read(file, max(end - SEARCHED_BYTES, 0), end)
    place = len(data)
    while (place := data.rfind(EVALUATION, 0, place)) >= 0:
        first, last = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
        if held_out := history_of(records_of([data[first:last]])[0]).held_out:
            return held_out[-1]
    return None


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)
