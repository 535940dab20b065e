"""What is worth an alert, told as one JSON object; and which alerts were delivered already."""

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
"""State of a run -> the event that it is."""
KEPT_DELIVERIES = 1000


@dataclass(frozen=True)
class Alert:
    """One event. identity: the same for what is the same event, however often it is looked at."""

    identity: str
    body: dict[str, Any]


def alert_of(status: Status, reasons: Iterable[str]) -> Alert | None:
    """The event that a run's state is, if it is one. reasons: lines of the diagnosis."""
    event = STATES.get(status.state)
    if event is None:
        return None
    run = status.run
    attempt = (run.attempt_numbers() or [0])[-1]
    # A run can stall, go on and stall again: what it recorded last tells one stall from the next.
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
        # The field that chat services show.
        "text": "\n".join([_headline(status, event, message), *lines]),
    }
    return Alert(f"{event}:{attempt}:{status.history.global_step}{since}", body)


def _headline(status: Status, event: str, message: str) -> str:
    name = f"{status.run.experiment}/{status.run.trial}"
    at = f" at step {status.history.global_step} of {status.total_steps or '?'}"
    if event == "stalled":
        return f"{name} is stalled{at}: nothing recorded for {duration(status.silence)}"
    return f"{name} {event}{at}" + (f": {message}" if message else "")


class Delivered:
    """Which alerts went to a receiver, kept in a file so that a later watcher does not repeat them.

    receiver: a name that tells receivers apart and holds no secret.
    """

    def __init__(self, path: Path, receiver: str) -> None:
        self._path = path
        self._receiver = receiver
        self._ours: set[str] = set()

    def __contains__(self, alert: Alert) -> bool:
        return alert.identity in self._ours or alert.identity in self._read().get(self._receiver, [])

    def add(self, alert: Alert) -> bool:
        """Remember a delivery; False where it could not be written down, and is only known while we live."""
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
