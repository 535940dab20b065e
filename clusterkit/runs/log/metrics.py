"""metrics.jsonl: an incremental reader that tolerates torn lines, the history of a run across attempts, and its end.

docs/run-directory.md defines the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from clusterkit.common.records import json_object
from clusterkit.common.text_plot import iso_time

Record = dict[str, Any]

_MAPPINGS = ("stats", "timings", "metrics", "versions", "machine")
_LATEST_TIME = 1e11
"""Unix seconds, some thousand years from now: a larger value is no time."""

RECENT_STEPS = 20
"""Step times older than this say little about the steps to come."""
STALLED_AFTER_SECONDS = 60.0
STALLED_AFTER_STEPS = 5.0
STALLED_OUTSIDE_STEPS_SECONDS = 1200.0
"""Loading a model, the first evaluation and the first step are silent, and their time is unknown."""
STALLED_CLOSING_TIMES = 2.0
"""So many times as long as the same evaluation took before the first step."""

PIECE_BYTES = 4 << 20
"""So much of a file is in memory at a time, besides its records."""
TAIL_BYTES = (128 << 10, 1 << 20, 8 << 20)
"""How much of the end is read: the next more where a step is longer than that."""
SEARCHED_BYTES = 4 << 20
"""So far before the tail the last held-out evaluation is looked for: some runs evaluate every few hundred steps."""
EVALUATION = b'"kind": "eval"'


class MetricsTail:
    """Reads the records that were appended since the last call; an incomplete line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Record]:
        """Return new complete records, oldest first; none if the file does not exist yet."""
        found: list[Record] = []
        try:
            with self.path.open("rb") as file:
                self._go_back(self._offset - file.seek(0, os.SEEK_END))
                file.seek(self._offset)
                while data := file.read(PIECE_BYTES):
                    self._offset += len(data)
                    *lines, self._partial = (self._partial + data).split(b"\n")
                    records, damaged = records_of(lines)
                    found += records
                    self.damaged += damaged
        except FileNotFoundError:
            return []
        except OSError:
            if not found:  # what was read counts: the next call meets the error again
                raise
        return found

    def _go_back(self, missing: int) -> None:
        """Forget bytes that have been read and are gone: of a line that found no room on the disk, else of all."""
        if missing > 0:
            torn = missing <= len(self._partial)
            self._offset, self._partial = (self._offset - missing, self._partial[:-missing]) if torn else (0, b"")


def records_of(lines: Iterable[bytes]) -> tuple[list[Record], int]:
    """Return the records of complete lines, and how many of the lines are damaged."""
    records, damaged = [], 0
    for line in lines:
        if not line.strip():
            continue
        text = line.decode("utf-8", errors="replace")
        record = _record(text)
        if record is None:
            damaged += 1
            # A killed writer leaves half a line, which the next attempt continues with its own record: keep that.
            record = _last_record_within(text)
        if record is not None:
            records.append(record)
    return records, damaged


def _record(text: str) -> Record | None:
    value = json_object(text)
    return _plain(value) if value is not None and isinstance(value.get("kind"), str) else None


def _plain(record: Record) -> Record:
    """Return a record without fields that no trainer writes: numbers that are not finite, mappings that are none.

    Numbers within `stats` may be NaN: users must see that.
    """
    wrong = [
        key
        for key, value in record.items()
        if (isinstance(value, float) and not math.isfinite(value))
        or _is_huge(value)
        or (key in _MAPPINGS and (not isinstance(value, dict) or any(map(_is_huge, value.values()))))
        or (key == "time" and not 0 <= (number(record, key) or 0.0) <= _LATEST_TIME)
    ]
    return {key: value for key, value in record.items() if key not in wrong} if wrong else record


def _is_huge(value: Any) -> bool:
    """Whether a value is an integer of hundreds of digits, too large for a float."""
    return isinstance(value, int) and abs(value) >= 1 << 63


def _last_record_within(text: str) -> Record | None:
    start = text.rfind("{")
    while start > 0:
        record = _record(text[start:])
        if record is not None:
            return record
        start = text.rfind("{", 0, start)
    return None


class History:
    """The records of a run that count: steps after the recover checkpoint of a later attempt are dropped.

    `start` is the first record of the newest attempt, `warmup` the latest one of a warm-up in progress, `finish` says
    how the latest attempt ended; else None. `before` is what was measured before the first step, where the records may
    have lost it: those that were read are only the newest.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.attempts: list[Record] = []
        self.steps: list[Record] = []
        self.evals: list[Record] = []
        self.saves: list[Record] = []
        self.recovers: list[Record] = []
        self.warnings: list[str] = []
        self.before: list[Record] = []
        self.start: Record | None = None
        self.warmup: Record | None = None
        self.finish: Record | None = None
        self.last_time: float | None = None
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        """Add records in their order."""
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add one record; unknown kinds are ignored."""
        kind = record["kind"]
        if kind != "start":  # servers may load for longer than a silence is borne
            self.last_time = number(record, "time") or self.last_time
        if self.finish is not None and whole(record, "attempt") > whole(self.finish, "attempt"):
            self.finish = None  # a new attempt has begun; its warm-up is recorded before its `attempt`
        if kind == "warmup":
            self.warmup = record
        elif kind in ("attempt", "step", "eval"):
            self.warmup = None
        if kind == "start":
            self.start = record
        elif kind == "attempt":
            self._begin_attempt(record)
        elif kind == "warning":
            self.warnings.append(str(record.get("message", "")))
        elif kind == "finish":
            self.finish = record
        elif kind in ("step", "eval", "save", "recover"):
            {"step": self.steps, "eval": self.evals, "save": self.saves, "recover": self.recovers}[kind].append(record)

    def _begin_attempt(self, record: Record) -> None:
        self.attempts.append(record)
        resume_step = whole(record, "resume_step")
        for records in (self.steps, self.evals, self.saves):
            records[:] = [old for old in records if whole(old, "global_step") <= resume_step]

    @property
    def held_out(self) -> list[Record]:
        """Evaluations during the run; at other lengths, blanked or read otherwise, they belong to the final table."""
        other = ("chunks", "documents", "blank_memory", "method")
        return [record for record in self.evals if not any(map(record.get, other))]

    @property
    def is_in_warmup(self) -> bool:
        """Whether the run has got no further than its warm-up, which is kept in the cache."""
        return self.warmup is not None and not self.attempts

    @property
    def is_before_first_step(self) -> bool:
        """Whether the trainer has loaded, learns, and has made no step yet: it measures held-out tasks first."""
        loaded = bool(self.attempts) and self.warmup is None
        return loaded and self.learns and not self.steps and not whole(self.attempts[-1], "resume_step")

    @property
    def is_closing(self) -> bool:
        """Whether the last step is done, after which the closing table is measured."""
        return 0 < self.total_steps <= self.global_step

    @property
    def closing_lines(self) -> int:
        """Lines of the closing table that have been measured."""
        return len(self._closed)

    @property
    def closing_text(self) -> str:
        """How far the closing table is, in words; older runs do not tell how many lines it has."""
        lines = whole((self.attempts or [{}])[-1], "table_lines")
        return f"{self.closing_lines}{f' of {lines}' if lines else ''} lines of the table done"

    @property
    def closing_seconds(self) -> float:
        """Seconds of the lines of the closing table that are to come, by what each took before the first step.

        0 where that is not known: nothing was measured before, or nothing is held out.
        """
        return sum(seconds for line, seconds in self._before.items() if line not in self._closed)

    @property
    def _before(self) -> dict[tuple[int, int, bool, str], float]:
        """Lines that were measured before the first step, with the seconds that they took."""
        before = [*self.before, *(one for one in self.evals if one.get("name") == "before")]
        return {_table_line(one): number(one, "seconds") or 0.0 for one in before}

    @property
    def _closed(self) -> set[tuple[int, int, bool, str]]:
        """Lines that this attempt has after the last step; it records those again that it takes over."""
        attempt = whole((self.attempts or self.steps or [{}])[-1], "attempt")
        after = (one for one in self.evals if one.get("name") == "after")
        return {_table_line(one) for one in after if whole(one, "attempt") == attempt}

    @property
    def learns(self) -> bool:
        """Whether the run trains; not so with trainer.type=null."""
        return not self.attempts or self.attempts[-1].get("type") != "null"

    @property
    def global_step(self) -> int:
        """The last training step that counts, 0 before the first."""
        return whole(self.steps[-1], "global_step") if self.steps else 0

    @property
    def total_steps(self) -> int:
        """Planned steps of the latest attempt, 0 if unknown."""
        for record in [*self.attempts[-1:], *self.steps[-1:]]:
            if total := whole(record, "total_steps"):
                return total
        return 0

    def progress(self, total_steps: int, eta: float | None) -> dict[str, Any]:
        """Return the `progress` of a status as JSON.

        Args:
            total_steps: 0 if unknown.
            eta: seconds; None if unknown.
        """
        last = self.steps[-1] if self.steps else {}
        return {
            "epoch": last.get("epoch"),
            "epochs": last.get("epochs"),
            "step": last.get("epoch_step"),
            "steps": last.get("steps_per_epoch"),
            "global_step": self.global_step,
            "total_steps": total_steps or None,
            "eta_s": eta,
            "step_time_s": self.step_time(),
        }

    def step_time(self, *, evaluations: bool = True) -> float | None:
        """Return the median seconds of the recent steps, over attempts; with or without evaluations within them."""
        recent = self.steps[-RECENT_STEPS:]
        spent = [0.0 if evaluations else number(mapping(step, "timings"), "eval") or 0.0 for step in recent]
        times = [number(step, "step_time_s") for step in recent]
        known = [time - off for time, off in zip(times, spent, strict=True) if time is not None and math.isfinite(time)]
        return median(known) if known else None

    def eta(self) -> float | None:
        """Return the seconds of all steps to come, by the recent ones; None before the first step."""
        step_time = self.step_time()
        if step_time is None or not self.total_steps:
            return None
        return max(self.total_steps - self.global_step, 0) * step_time

    def remaining(self, now: float) -> float | None:
        """Return the seconds from `now` (Unix seconds) to the end of the last step; None before the first step."""
        eta = self.eta()
        if eta is None or not self.steps:
            return eta
        passed = now - (number(self.steps[-1], "time") or now)
        return eta - min(max(passed, 0.0), self.step_time() or 0.0, eta)

    def left(self, steps_left: float | None) -> float | None:
        """Return the seconds to the end of the run, its closing evaluation included; None where they are unknown.

        steps_left: seconds to the end of the last step.
        """
        return None if steps_left is None else steps_left + self.closing_seconds

    @property
    def patience(self) -> float:
        """Seconds of silence that are normal; before and after the steps a table is measured, with few records."""
        step_time = self.step_time()
        if step_time is None:
            return STALLED_OUTSIDE_STEPS_SECONDS
        least = STALLED_AFTER_SECONDS
        if self.is_closing:  # with servers the first line of the table comes with much of the others done
            least = max(STALLED_OUTSIDE_STEPS_SECONDS, STALLED_CLOSING_TIMES * sum(self._before.values()))
        return max(least, STALLED_AFTER_STEPS * step_time)

    def stat(self, name: str) -> list[float]:
        """Return the values of one number of `stats` over the steps."""
        values = [number(mapping(step, "stats"), name) for step in self.steps]
        return [value for value in values if value is not None]

    def time_split(self) -> dict[str, float]:
        """Return the seconds spent on each part of the steps."""
        split: dict[str, float] = {}
        for step in self.steps:
            for part, seconds in mapping(step, "timings").items():
                if isinstance(seconds, int | float) and abs(seconds) < _LATEST_TIME:
                    split[part] = split.get(part, 0.0) + seconds
        return split


def read_history(path: Path) -> History:
    """Return the whole history of one metrics.jsonl; empty if there is none."""
    return History(MetricsTail(path).read())


def newest_history(path: Path, *, evaluates: bool = True) -> tuple[History, int]:
    """Return what the end of a run's records tells, and how many damaged lines it has.

    It has the newest steps, the newest held-out evaluation and how the run ended. It is empty where there is no file.

    Args:
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
                history = History(records)
                if not begin or history.steps:
                    break
            if begin and evaluates and not history.held_out and (found := _last_evaluation(file, begin)):
                history = History([found, *records])
    except FileNotFoundError:
        return History(), 0
    return history, damaged


def _last_evaluation(file: BinaryIO, end: int) -> Record | None:
    """Return the last held-out evaluation that is recorded before a place in the file."""
    data = _read(file, max(end - SEARCHED_BYTES, 0), end)
    place = len(data)
    while (place := data.rfind(EVALUATION, 0, place)) >= 0:
        first, last = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
        if held_out := History(records_of([data[first:last]])[0]).held_out:
            return held_out[-1]
    return None


def _read(file: BinaryIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _table_line(record: Record) -> tuple[int, int, bool, str]:
    """Return which line of the closing table an evaluation is; older records have no method."""
    method = str(record.get("method") or "")
    return whole(record, "chunks"), whole(record, "documents"), bool(record.get("blank_memory")), method


def latest_checkpoint(records: list[Record], now: float) -> dict[str, Any]:
    """Return when the last checkpoint was written, its age at `now` and its step, as a status has them in JSON."""
    last = records[-1] if records else {}
    written = number(last, "time")
    return {
        "last_dump": None if written is None else iso_time(written),
        "age_s": None if written is None else max(now - written, 0.0),
        "global_step": last.get("global_step"),
    }


def whole(record: Record, key: str) -> int:
    """Return an integer field, or 0 if it is missing or no number."""
    value = number(record, key)
    return int(value) if value is not None and math.isfinite(value) else 0


def mapping(record: Record, key: str) -> Record:
    """Return a mapping field, or an empty one if it is missing or no mapping."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def score_name(*records: Record) -> str:
    """Return what the `accuracy` of evaluations or of summaries is called: "score" where they differ.

    Those that do not say, as all of older runs, have an accuracy.
    """
    said = [record.get("score_name") for record in records]
    names = {name if isinstance(name, str) else "accuracy" for name in said} or {"accuracy"}
    return names.pop() if len(names) == 1 else "score"


def number(record: Record, key: str) -> float | None:
    """Return a numeric field, or None if it is missing or no number."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
