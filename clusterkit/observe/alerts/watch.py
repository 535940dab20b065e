"""Watch a run and send alerts about what is new."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from clusterkit.backends.records import Runs
from clusterkit.observe.alerts.delivery import WAITS, Receiver, UndeliveredError, deliver
from clusterkit.observe.alerts.events import Alert, Delivered, alert_of
from clusterkit.runs.diagnose.view import explain
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.status import observe
from trainer.errors import UserError


class Suspensions:
    """How long this machine was suspended since a run's last record."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        self._last: float | None = None
        self._asleep = 0.0

    def since(self, last: float | None, wall: float, awake: float) -> float:
        """Return the seconds of it, at most those since the record.

        Args:
            last: time of the run's last record, Unix seconds.
            wall: now, Unix seconds.
            awake: now, on a clock that stands still while the machine is suspended.
        """
        if self._before is not None:
            if last != self._last:
                self._asleep = 0.0
            self._asleep += max((wall - self._before[0]) - (awake - self._before[1]), 0.0)
        # A record that came after the machine woke up leaves nothing of the suspension before it.
        self._asleep = 0.0 if last is None else min(self._asleep, max(wall - last, 0.0))
        self._before, self._last = (wall, awake), last
        return self._asleep


class Watcher:
    """Watches one run for one receiver.

    Args:
        say: called with a sentence for every alert, delivered or not.
        waits: seconds between attempts to deliver.
        mirror: where the run is looked at, which updates the copy of a remote one before every look.
        record: file of the delivered alerts; None: in the run's folder.
    """

    def __init__(
        self,
        run: RunDirectory,
        receiver: Receiver,
        say: Callable[[str], None],
        waits: tuple[float, ...] = WAITS,
        *,
        mirror: Runs | None = None,
        record: Path | None = None,
    ) -> None:
        self.run, self.receiver, self.say, self.waits = run, receiver, say, waits
        self._mirror, self._record = mirror or Runs(run.fileroot), record or run.logs / "alerts.json"
        self.delivered = Delivered(self._record, receiver.name)
        self._tail, self._history = MetricsTail(run.metrics), History()
        self._problem = ""
        # Where a run of other machines has its copy, its silence is theirs.
        self._suspensions = Suspensions() if type(self._mirror) is Runs else None

    def look(self) -> tuple[str, bool]:
        """Observe the run once; return its state, and whether its alert, if any, is delivered.

        Raises:
            RunError: the run is remote and cannot be reached.
        """
        self._mirror.fetch(self.run)
        self._history.extend(self._tail.read())
        now, asleep = time.time(), 0.0
        if self._suspensions is not None:
            asleep = self._suspensions.since(self._history.last_time, now, time.monotonic())
        status = observe(self.run, now, self._history, asleep=asleep)
        alert = alert_of(status, ())
        if alert is None or alert in self.delivered:
            return status.state, True
        self._mirror.fetch(self.run, logs=True)
        return status.state, self._send(alert_of(status, explain(status).lines) or alert)

    def watch(self, every: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Look every so many seconds until the run is complete and that alert is delivered; errors do not end it."""
        while True:
            try:
                state, sent = self.look()
            except Exception as error:  # nobody would notice a dead watcher
                lines = str(error).strip().splitlines() or [type(error).__name__]
                kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
                self._say_once(f"cannot see the run for now ({kind}{lines[0]}); trying again")
            else:
                self._problem = "" if sent else self._problem
                if state == "finished" and sent:
                    return True
            sleep(every)

    def _say_once(self, problem: str) -> None:
        """Report a problem only when it is new."""
        if problem != self._problem:
            self._problem = problem
            with suppress(OSError):  # stderr may be on the disk that is full
                self.say(problem)

    def _send(self, alert: Alert) -> bool:
        what = f"{alert.body['event']}, step {alert.body['global_step']}"
        try:
            deliver(self.receiver, self._mirror.with_original_paths(alert.body), self.waits)
        except UndeliveredError as error:
            self._say_once(f"not delivered ({what}): {error}; trying again")
            return False
        kept = self.delivered.add(alert)
        self._say_once(f"delivered: {what}" + ("" if kept else f" (could not be noted in {self._record.parent})"))
        return True
