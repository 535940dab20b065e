"""Look at a run again and again, and send what is new."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from clusterkit.observe.alerts.delivery import WAITS, Receiver, UndeliveredError, deliver
from clusterkit.observe.alerts.events import Alert, Delivered, alert_of
from clusterkit.runs.diagnose.view import explain_status
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.status import observe
from trainer.errors import UserError


class RemoteRun(Protocol):
    """Where the run really is, when its directory here is a copy."""

    def fetch(self, run: RunDirectory, *, logs: bool) -> None:
        """Bring the copy up to date."""

    def told(self, value: dict[str, Any]) -> dict[str, Any]:
        """An alert with the real places in it."""


class Watcher:
    """Watches one run for one receiver.

    say: gets a sentence for every alert, delivered or not. elsewhere: brings the run's copy up to date before every
    look. kept: file of what was delivered; beside the run where it is left out.
    """

    def __init__(
        self,
        run: RunDirectory,
        receiver: Receiver,
        say: Callable[[str], None],
        waits: tuple[float, ...] = WAITS,
        *,
        elsewhere: RemoteRun | None = None,
        kept: Path | None = None,
    ) -> None:
        self.run, self.receiver, self.say, self.waits = run, receiver, say, waits
        self._elsewhere, self._kept = elsewhere, kept or run.logs / "alerts.json"
        self.delivered = Delivered(self._kept, receiver.name)
        self._tail, self._history = MetricsTail(run.metrics), History()
        self._trouble = ""

    def look(self) -> tuple[str, bool]:
        """One look: the run's state, and whether everything there was to send has been delivered.

        Raises:
            RunError: the run is elsewhere and cannot be seen.

        """
        if self._elsewhere is not None:
            self._elsewhere.fetch(self.run, logs=False)
        for record in self._tail.read():
            self._history.add(record)
        status = observe(self.run, time.time(), self._history)
        alert = alert_of(status, ())
        if alert is None or alert in self.delivered:
            return status.state, True
        if self._elsewhere is not None:
            self._elsewhere.fetch(self.run, logs=True)
        return status.state, self._send(alert_of(status, explain_status(status)) or alert)

    def watch(self, every: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Look every so many seconds until the run is complete and that is delivered, whatever a look comes upon."""
        while True:
            try:
                state, sent = self.look()
            except Exception as error:  # a watcher that has died is told by nobody
                lines = str(error).strip().splitlines() or [type(error).__name__]
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self._say_once(f"cannot see the run for now ({kind}{lines[0]}); trying again")
            else:
                self._trouble = "" if sent else self._trouble
                if state == "finished" and sent:
                    return True
            sleep(every)

    def _say_once(self, trouble: str) -> None:
        """Tell it when it is new: the same every minute, for days, would hide all else."""
        if trouble != self._trouble:
            self._trouble = trouble
            with suppress(OSError):  # stderr may be on the disk that is full
                self.say(trouble)

    def _send(self, alert: Alert) -> bool:
        what = f"{alert.body['event']}, step {alert.body['global_step']}"
        try:
            body = self._elsewhere.told(alert.body) if self._elsewhere else alert.body
            deliver(self.receiver, body, self.waits)
        except UndeliveredError as error:
            self._say_once(f"not delivered ({what}): {error}; trying again")
            return False
        kept = self.delivered.add(alert)
        self._say_once(f"delivered: {what}" + ("" if kept else f" (could not be noted in {self._kept.parent})"))
        return True
