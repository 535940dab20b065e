"""The events that are alerts, as JSON objects, and the record of delivered ones."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.common.text_plot import duration, iso_time
from clusterkit.runs.status import Status
from trainer.files import write_atomic

STATES = {
    "failed": "failed",
    "killed": "failed",
    "stalled": "stalled",
    "finished": "completed",
    "interrupted": "stopped",
}
"""Events by the state of a run."""
KEPT_DELIVERIES = 1000


@dataclass(frozen=True)
class Alert:
    """One event. `identity` is equal for the same event, however often the run is observed."""

    identity: str
    body: dict[str, Any]


def alert_of(status: Status, reasons: Iterable[str]) -> Alert | None:
    """Return the alert about a run's state, or None. `reasons`: lines of the diagnosis."""
    event = STATES.get(status.state)
    if event is None:
        return None
    run = status.run
    attempt = (run.attempt_numbers() or [0])[-1]
    # A run can stall several times: the time of its last record distinguishes stalls.
    since = f":{status.history.last_time}" if event == "stalled" else ""
    lines = list(reasons)
    message = status.message.splitlines()[0] if status.message else ""
    body = {
        "event": event,
        "experiment": run.experiment,
        "trial": run.trial,
        "state": status.state,
        "message": message,
        "global_step": status.history.global_step,
        "total_steps": status.total_steps or None,
        "attempt": attempt,
        "seconds_since_last_record": status.silence,
        "host": socket.gethostname(),
        "run_dir": str(run.logs),
        "observed_at": iso_time(status.observed_at),
        "diagnosis": lines,
        # Chat services show this field.
        "text": "\n".join([_headline(status, event, message), *lines]),
    }
    return Alert(f"{event}:{attempt}:{status.history.global_step}{since}", body)


def _headline(status: Status, event: str, message: str) -> str:
    at = f" at step {status.history.global_step} of {status.total_steps or '?'}"
    if event == "stalled":
        return f"{status.run.name} is stalled{at}: nothing recorded for {duration(status.silence)}"
    return f"{status.run.name} {event}{at}" + (f": {message}" if message else "")


class Delivered:
    """The alerts that a receiver got, in a file, so that a later watcher does not repeat them."""

    def __init__(self, path: Path, receiver: str) -> None:
        self._path = path
        self._receiver = receiver
        self._ours: set[str] = set()

    def __contains__(self, alert: Alert) -> bool:
        return alert.identity in self._ours or alert.identity in self._read().get(self._receiver, [])

    def add(self, alert: Alert) -> bool:
        """Record a delivery; return False if it could not be saved, so only this process knows it."""
        self._ours.add(alert.identity)
        kept = self._read()
        kept[self._receiver] = [*kept.get(self._receiver, []), alert.identity][-KEPT_DELIVERIES:]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(kept, indent=1))
        except OSError:
            return False
        return True

    def _read(self) -> dict[str, list[str]]:
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(value, dict):
            return {}
        return {name: items for name, items in value.items() if isinstance(items, list)}
