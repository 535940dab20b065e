"""A log at one moment: one model, for people and as JSON."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from clusterkit.common.text_plot import duration
from clusterkit.runs.log.kinds import OURS, Traceback, kind_of, last_traceback
from clusterkit.runs.log.metrics import Record, number
from clusterkit.runs.log.ours import is_ours
from clusterkit.runs.log.progress import LogHistory

SILENT_AFTER_SECONDS = 60.0
SILENT_AFTER_STEPS = 5.0
SILENT_BEFORE_FIRST_STEP_SECONDS = 600.0
"""The same patience as `clusterkit status` has with runs of this machine."""

TIME_ZONES_SECONDS = 14 * 3600.0
"""Stamps have no time zone: a log that seems younger than this may come from hosts with another one."""

SAMPLE_BYTES = 256 * 1024
"""Of a log's beginning and of its end, by which it is told what wrote it and whether an error ended it."""

_DIALECTS = {"v0.2": "AReaL v0.2", "v0.3": "AReaL v0.3", "lite": "AReaL Lite/1.x"}


@dataclass(frozen=True)
class Sample:
    """Text of a log's beginning and of its end."""

    begin: bytes = b""
    end: bytes = b""

    @classmethod
    def of_file(cls, file: BinaryIO) -> Sample:
        """Those of an open plain file."""
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        begin = file.read(SAMPLE_BYTES)
        file.seek(max(size - SAMPLE_BYTES, 0))
        return cls(begin, file.read(SAMPLE_BYTES))


@dataclass(frozen=True)
class LogView:
    """One observation of a log. Its history is the reader's own, which the next refresh goes on with.

    size: bytes of the file. modified: when it last grew (Unix seconds). news: bytes that were read for this view.
    notes: what else there is to say of reading it. closed: nothing more can come.
    """

    path: Path
    history: LogHistory
    size: int
    modified: float
    news: int
    observed_at: float
    sample: Sample = Sample()
    notes: tuple[str, ...] = ()
    closed: bool = False

    @cached_property
    def kind(self) -> str:
        """Who wrote it, "" where that is not known."""
        history = self.history
        told = history.steps or history.attempts or history.recover_count or history.save_count
        if told or history.finish or history.last_time is not None:
            return OURS
        return kind_of(self.sample.begin) or kind_of(self.sample.end)

    @cached_property
    def traceback(self) -> Traceback | None:
        """The error that ends it, if one does."""
        found = last_traceback(self.sample.end)
        return found if found is not None and found.ends else None

    @property
    def state(self) -> str:
        """empty, running, silent, finished, interrupted, failed, or unknown: no log of AReaL or of clusterkit.

        A log cannot tell a dead run from a silent one.
        """
        if self.history.finish is not None:
            status = str(self.history.finish["status"])
            return "finished" if status == "completed" else status
        if self.history.failure is not None or self.traceback is not None:
            return "failed"
        if not self.size and not self.history.steps:
            return "empty"
        if self.kind != OURS:
            return "unknown"
        return "silent" if self.closed or self.silence > self.patience else "running"

    @property
    def ended(self) -> bool:
        """Whether nothing more is to come: its run is over (one that failed may be started again), or it is closed."""
        if self.closed or self.state not in ("finished", "interrupted", "failed"):
            return self.closed
        # After a traceback a living run may go on; until then it is the end of the log.
        told = self.history.finish or self.history.failure
        return told is not None or self.observed_at - self.modified > SILENT_AFTER_SECONDS

    @property
    def name(self) -> str:
        """The log's name for people."""
        return "standard input" if str(self.path) == "-" else str(self.path)

    @property
    def message(self) -> str:
        """What there is to say about the state."""
        told = self.history.finish or self.history.failure
        if told is not None:
            return str(told.get("message") or "")
        if self.traceback is not None:
            return self.traceback.message
        if self.state == "unknown":
            command = f"clusterkit diagnose --log {shlex.quote(str(self.path))}"
            like = f"; it looks like one of {self.kind}. What it says of errors: {command}" if self.kind else ""
            return f"{self.name} is no log of AReaL or of clusterkit: nothing in it is known{like}"
        if self.state == "silent" and self.closed:
            return "the log ends here, without a word on how the run ended"
        if self.state == "silent":
            return f"nothing new for {duration(self.silence)}; up to {duration(self.patience)} would be normal"
        return ""

    @property
    def silence(self) -> float:
        """Seconds since the file grew, or since its last message where that shows that it is an old log's copy."""
        grown = max(self.observed_at - self.modified, 0.0)
        told = self.observed_at - (self.history.last_time or self.observed_at)
        return max(grown, told) if self.history.steps and told > TIME_ZONES_SECONDS + self.patience else grown

    @property
    def patience(self) -> float:
        """Seconds of silence that are normal."""
        step_time = self.history.step_time()
        if step_time is None:
            return SILENT_BEFORE_FIRST_STEP_SECONDS
        return max(SILENT_AFTER_SECONDS, SILENT_AFTER_STEPS * step_time)

    @property
    def eta(self) -> float | None:
        """Seconds to the end of the last step, less what has passed of the current one; None where it is over."""
        eta = self.history.eta()
        if eta is None or self.ended:
            return None
        passed = self.observed_at - (number(self.history.steps[-1], "time") or self.observed_at)
        return eta - min(max(passed, 0.0), self.history.step_time() or 0.0, eta)

    @property
    def dialect(self) -> str:
        """Who wrote the log, "" where it does not say."""
        if not self.history.steps:
            return _DIALECTS.get(self.history.dialect, "")
        last = self.history.steps[-1]
        if is_ours(last):
            return "clusterkit"
        return _DIALECTS[self.history.dialect or ("v0.2" if "tokens" in last else "v0.3")]

    def as_dict(self) -> dict[str, Any]:
        """The shape of `clusterkit status --log FILE --json`; docs/runlog.md tells it."""
        history = self.history
        last = history.steps[-1] if history.steps else {}
        return {
            "log": str(self.path),
            "bytes": self.size,
            "bytes_read": self.news,
            "dialect": self.dialect or None,
            "state": self.state,
            "message": self.message,
            "kind": self.kind or None,
            "notes": list(self.notes),
            "traceback": list(self.traceback.lines) if self.traceback else None,
            "progress": history.progress(history.total_steps, self.eta),
            "stats": last.get("stats") or {},
            "history": _columns(history.steps),
            "time_split": history.time_split(),
            "recover": {
                **self._checkpoint(history.recovers, "last_dump"),
                "count": history.recover_count,
            },
            "save": {
                **self._checkpoint(history.saves, "last_save"),
                "count": history.save_count,
                "path": history.saves[-1].get("path") if history.saves else None,
            },
            "attempts": history.attempt if history.steps or history.attempts else 0,
            "resumed_from": history.attempts[-1]["resume_step"] if history.attempts else None,
            "restarts": [_told(record) for record in history.restarts],
            "errors": [_told(record) for record in history.errors],
            "warnings": history.warnings,
            "events": [_told(record) for record in history.events],
            "observed_at": iso_time(self.observed_at),
            "seconds_since_last_line": self.silence,
        }

    def _checkpoint(self, records: list[Record], name: str) -> dict[str, Any]:
        last = records[-1] if records else {}
        written = number(last, "time")
        return {
            name: None if written is None else iso_time(written),
            "age_s": None if written is None else max(self.observed_at - written, 0.0),
            "global_step": last.get("global_step"),
        }


def iso_time(seconds: float) -> str:
    """Unix seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _told(record: Record) -> Record:
    time = number(record, "time")
    told = {name: value for name, value in record.items() if name not in ("point", "dialect")}
    return {**told, "time": None if time is None else iso_time(time)}


def _columns(steps: list[Record]) -> dict[str, list[Any]]:
    """The course of every number, one value a step, None where a step lacks it."""
    names = dict.fromkeys(name for step in steps for name in step["stats"])
    columns: dict[str, list[Any]] = {
        "global_step": [step["global_step"] for step in steps],
        "step_time_s": [step["step_time_s"] for step in steps],
    }
    return columns | {name: [step["stats"].get(name) for step in steps] for name in names}
