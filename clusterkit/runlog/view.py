"""A log at one moment: one model, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from clusterkit.runlog.metrics import Record, number
from clusterkit.runlog.ours import is_ours
from clusterkit.runlog.progress import LogHistory
from clusterkit.textplot import duration

SILENT_AFTER_SECONDS = 60.0
SILENT_AFTER_STEPS = 5.0
SILENT_BEFORE_FIRST_STEP_SECONDS = 600.0
"""The same patience as `clusterkit status` has with runs of this machine."""

TIME_ZONES_SECONDS = 14 * 3600.0
"""Stamps have no time zone: a log that seems younger than this may come from hosts with another one."""

_DIALECTS = {"v0.2": "AReaL v0.2", "v0.3": "AReaL v0.3", "lite": "AReaL Lite/1.x"}


@dataclass(frozen=True)
class LogView:
    """One observation of a log. Its history is the reader's own, which the next refresh goes on with.

    size: bytes of the file. modified: when it last grew (Unix seconds). news: bytes that were read for this view.
    """

    path: Path
    history: LogHistory
    size: int
    modified: float
    news: int
    observed_at: float

    @property
    def state(self) -> str:
        """empty, running, silent, finished, interrupted or failed. A log cannot tell a dead run from a silent one."""
        if self.history.finish is not None:
            status = str(self.history.finish["status"])
            return "finished" if status == "completed" else status
        if self.history.failure is not None:
            return "failed"
        if not self.size and not self.history.steps:
            return "empty"
        return "silent" if self.silence > self.patience else "running"

    @property
    def ended(self) -> bool:
        """Whether the log says that its run is over. An interrupted or failed one may be started again."""
        return self.state in ("finished", "interrupted", "failed")

    @property
    def message(self) -> str:
        """What there is to say about the state."""
        told = self.history.finish or self.history.failure
        if told is not None:
            return str(told.get("message") or "")
        if self.state == "silent":
            return f"nothing new for {duration(self.silence)}; up to {duration(self.patience)} would be normal"
        if self.state == "running" and not self.history.steps and self.history.last_time is None:
            return "as it grew just now; nothing in it is known so far, neither of AReaL's nor of clusterkit's lines"
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
