"""The state of a log at one moment, for people and as JSON."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from clusterkit.common.text_plot import duration, iso_time
from clusterkit.runs.log.kinds import OURS, Traceback, kind_of, last_traceback
from clusterkit.runs.log.metrics import STALLED_AFTER_SECONDS, Record, latest_checkpoint, number
from clusterkit.runs.log.ours import is_ours
from clusterkit.runs.log.progress import LogHistory

TIME_ZONES_SECONDS = 14 * 3600.0
"""Time stamps have no time zone: a log that seems younger than this may come from hosts with another one."""

SAMPLE_BYTES = 256 * 1024
"""Size of a log's beginning and end that show which program wrote it and whether an error ended it."""

_DIALECTS = {"v0.2": "AReaL v0.2", "v0.3": "AReaL v0.3", "lite": "AReaL Lite/1.x"}


@dataclass(frozen=True)
class Sample:
    """The text of a log's beginning and of its end."""

    begin: bytes = b""
    end: bytes = b""

    @classmethod
    def of_file(cls, file: BinaryIO) -> Sample:
        """Read both from an open plain file."""
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        begin = file.read(SAMPLE_BYTES)
        file.seek(max(size - SAMPLE_BYTES, 0))
        return cls(begin, file.read(SAMPLE_BYTES))


@dataclass(frozen=True)
class LogView:
    """One observation of a log."""

    path: Path
    history: LogHistory  # the reader's own, which its next refresh continues
    size: int  # bytes of the file
    modified: float  # when the file last grew, in Unix seconds
    news: int  # bytes that were read for this view
    observed_at: float  # Unix seconds
    sample: Sample = Sample()  # its beginning and end
    notes: tuple[str, ...] = ()  # remarks on reading it
    closed: bool = False  # nothing more can come

    @cached_property
    def kind(self) -> str:
        """The program that wrote it; empty if unknown."""
        history = self.history
        recorded = history.steps or history.attempts or history.recover_count or history.save_count
        if recorded or history.finish or history.last_time is not None:
            return OURS
        return kind_of(self.sample.begin) or kind_of(self.sample.end)

    @cached_property
    def traceback(self) -> Traceback | None:
        """The traceback that ends it, if any."""
        found = last_traceback(self.sample.end)
        return found if found is not None and found.ends else None

    @property
    def state(self) -> str:
        """One of empty, running, silent, finished, interrupted, failed, and unknown (no log of AReaL or clusterkit).

        A log cannot distinguish a dead run from a silent one.
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
        return "silent" if self.closed or self.silence > self.history.patience else "running"

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the run is over (a failed one may be started again), or the log is closed."""
        if self.closed or self.state not in ("finished", "interrupted", "failed"):
            return self.closed
        # After a traceback a living run may go on; until then it is the end of the log.
        ending = self.history.finish or self.history.failure
        return ending is not None or self.observed_at - self.modified > STALLED_AFTER_SECONDS

    @property
    def name(self) -> str:
        """The log's path, or `standard input`."""
        return "standard input" if str(self.path) == "-" else str(self.path)

    @property
    def message(self) -> str:
        """The reason of the state; empty if there is none."""
        ending = self.history.finish or self.history.failure
        if ending is not None:
            return str(ending.get("message") or "")
        if self.traceback is not None:
            return self.traceback.message
        if self.state == "unknown":
            command = f"clusterkit diagnose --log {shlex.quote(str(self.path))}"
            like = f"; it looks like one of {self.kind}. What it says of errors: {command}" if self.kind else ""
            return f"{self.name} is not a log of AReaL or clusterkit: no line of it is one of theirs{like}"
        if self.state == "silent" and self.closed:
            return "the log ends here, and does not say how the run ended"
        if self.state == "silent":
            return f"nothing new for {duration(self.silence)}; up to {duration(self.history.patience)} would be normal"
        return ""

    @property
    def silence(self) -> float:
        """Seconds since the file grew; since its last message if that shows that it is a copy of an old log."""
        grown = max(self.observed_at - self.modified, 0.0)
        quiet = self.observed_at - (self.history.last_time or self.observed_at)
        is_old = bool(self.history.steps) and quiet > TIME_ZONES_SECONDS + self.history.patience
        return max(grown, quiet) if is_old else grown

    @property
    def eta(self) -> float | None:
        """Seconds to the end of the last step; None if the run is over or no step has ended."""
        return None if self.ended else self.history.remaining(self.observed_at)

    @property
    def dialect(self) -> str:
        """The version of AReaL, or clusterkit, that wrote the log; empty if unknown."""
        if not self.history.steps:
            return _DIALECTS.get(self.history.dialect, "")
        last = self.history.steps[-1]
        if is_ours(last):
            return "clusterkit"
        return _DIALECTS[self.history.dialect or ("v0.2" if "tokens" in last else "v0.3")]

    def as_dict(self) -> dict[str, Any]:
        """Return the shape of `clusterkit status --log FILE --json`, which docs/runlog.md defines."""
        history = self.history
        last = history.steps[-1] if history.steps else {}
        save = latest_checkpoint(history.saves, self.observed_at)
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
                **latest_checkpoint(history.recovers, self.observed_at),
                "count": history.recover_count,
            },
            "save": {
                "last_save": save.pop("last_dump"),
                **save,
                "count": history.save_count,
                "path": history.saves[-1].get("path") if history.saves else None,
            },
            "attempts": history.attempt if history.steps or history.attempts else 0,
            "resumed_from": history.attempts[-1]["resume_step"] if history.attempts else None,
            "restarts": [_with_iso_time(record) for record in history.restarts],
            "errors": [_with_iso_time(record) for record in history.errors],
            "warnings": history.warnings,
            "events": [_with_iso_time(record) for record in history.events],
            "observed_at": iso_time(self.observed_at),
            "seconds_since_last_line": self.silence,
        }


def _with_iso_time(record: Record) -> Record:
    time = number(record, "time")
    kept = {name: value for name, value in record.items() if name not in ("point", "dialect")}
    return {**kept, "time": None if time is None else iso_time(time)}


def _columns(steps: list[Record]) -> dict[str, list[Any]]:
    """Return every number as a list with one value a step, None where a step lacks it."""
    names = dict.fromkeys(name for step in steps for name in step["stats"])
    columns: dict[str, list[Any]] = {
        "global_step": [step["global_step"] for step in steps],
        "step_time_s": [step["step_time_s"] for step in steps],
    }
    return columns | {name: [step["stats"].get(name) for step in steps] for name in names}
