"""metrics.jsonl: an incremental reader that bears torn lines, and the run's history without repetitions.

The file's contract is docs/run-directory.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

Record = dict[str, Any]

_MAPPINGS = ("stats", "timings", "metrics", "versions")
_LATEST_TIME = 1e11
"""Unix seconds, some thousand years from now: a time beyond it was never one."""

RECENT_STEPS = 20
"""Step times older than this say little about the steps to come."""


class MetricsTail:
    """Reads records that were appended since the last call; a line without its end waits for the rest of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._offset = 0
        self._partial = b""

    def read(self) -> list[Record]:
        """New complete records, oldest first; none where the file does not exist yet."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        records = [self._parse(line) for line in lines if line.strip()]
        return [record for record in records if record is not None]

    def _parse(self, line: bytes) -> Record | None:
        text = line.decode("utf-8", errors="replace")
        record = _record(text)
        if record is None:
            self.damaged += 1
            # A killed writer leaves half a line and the next attempt's record follows on it: save the latter.
            record = _last_record_within(text)
        return record


def _record(text: str) -> Record | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return _plain(value) if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _plain(record: Record) -> Record:
    """A record without what no trainer writes: fields that are no finite number, or no mapping, where one belongs.

    Numbers within `stats` may be NaN: that is what a reader must be told.
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
    """A whole number of hundreds of digits, which no float holds."""
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
    """The run as it stands: what was undone by going back to a recover checkpoint is forgotten.

    warmup: the latest record of a warm-up that is going on, else None. finish: how the latest attempt ended, else None.
    """

    def __init__(self) -> None:
        self.attempts: list[Record] = []
        self.steps: list[Record] = []
        self.evals: list[Record] = []
        self.saves: list[Record] = []
        self.recovers: list[Record] = []
        self.warnings: list[str] = []
        self.warmup: Record | None = None
        self.finish: Record | None = None
        self.last_time: float | None = None

    def add(self, record: Record) -> None:
        """Take one record in; kinds that this version does not know are passed over."""
        kind = record["kind"]
        self.last_time = number(record, "time") or self.last_time
        if self.finish is not None and whole(record, "attempt") > whole(self.finish, "attempt"):
            self.finish = None  # the run lives again; its warm-up is told before its `attempt` record
        if kind == "warmup":
            self.warmup = record
        elif kind in ("attempt", "step", "eval"):
            self.warmup = None
        if kind == "attempt":
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
        """Evaluations of the run's own measure: other lengths of document and blanked memories are the table's."""
        return [record for record in self.evals if not record.get("chunks") and not record.get("blank_memory")]

    @property
    def learns(self) -> bool:
        """Whether the run changes weights; not with trainer.type=null."""
        return not self.attempts or self.attempts[-1].get("type") != "null"

    @property
    def global_step(self) -> int:
        """Training steps that count, 0 before the first."""
        return whole(self.steps[-1], "global_step") if self.steps else 0

    @property
    def total_steps(self) -> int:
        """Steps that the latest attempt means to make, 0 when unknown."""
        for record in [*self.attempts[-1:], *self.steps[-1:]]:
            if total := whole(record, "total_steps"):
                return total
        return 0

    def progress(self, total_steps: int, eta: float | None) -> dict[str, Any]:
        """The `progress` of every status as JSON. total_steps: 0 when unknown. eta: seconds."""
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

    def step_time(self) -> float | None:
        """Median seconds of the recent steps, over attempts."""
        times = [number(step, "step_time_s") for step in self.steps[-RECENT_STEPS:]]
        known = [time for time in times if time is not None and math.isfinite(time)]
        return median(known) if known else None

    def eta(self) -> float | None:
        """Seconds until the last step ends, from recent steps; None before the first one."""
        step_time = self.step_time()
        if step_time is None or not self.total_steps:
            return None
        return max(self.total_steps - self.global_step, 0) * step_time

    def stat(self, name: str) -> list[float]:
        """The course of one number of `stats` over the steps."""
        values = [number(_mapping(step, "stats"), name) for step in self.steps]
        return [value for value in values if value is not None]

    def time_split(self) -> dict[str, float]:
        """Seconds spent on each part of the steps."""
        split: dict[str, float] = {}
        for step in self.steps:
            for part, seconds in _mapping(step, "timings").items():
                if isinstance(seconds, int | float) and abs(seconds) < _LATEST_TIME:
                    split[part] = split.get(part, 0.0) + seconds
        return split


def read_history(path: Path) -> History:
    """The whole history of one metrics.jsonl; empty where there is none."""
    history = History()
    for record in MetricsTail(path).read():
        history.add(record)
    return history


def whole(record: Record, key: str) -> int:
    """A count, or 0 where it is missing or something else."""
    value = number(record, key)
    return int(value) if value is not None and math.isfinite(value) else 0


def _mapping(record: Record, key: str) -> Record:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def number(record: Record, key: str) -> float | None:
    """A numeric field, or None where it is missing or something else."""
    value = record.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
