"""Look at a run again and again, and send what is new."""

from __future__ import annotations

import time
from collections.abc import Callable

from clusterkit.alerts.delivery import WAITS, Receiver, UndeliveredError, deliver
from clusterkit.alerts.events import Alert, Delivered, alert_of
from clusterkit.diagnose.view import explain_status
from clusterkit.rundir import RunDirectory
from clusterkit.runlog.metrics import History, MetricsTail
from clusterkit.status import observe


class Watcher:
    """Watches one run for one receiver. say: gets a sentence for every alert, delivered or not."""

    def __init__(
        self,
        run: RunDirectory,
        receiver: Receiver,
        say: Callable[[str], None],
        waits: tuple[float, ...] = WAITS,
    ) -> None:
        self.run, self.receiver, self.say, self.waits = run, receiver, say, waits
        self.delivered = Delivered(run, receiver.name)
        self._tail, self._history = MetricsTail(run.metrics), History()

    def look(self) -> tuple[str, bool]:
        """One look: the run's state, and whether everything there was to send has been delivered."""
        for record in self._tail.read():
            self._history.add(record)
        status = observe(self.run, time.time(), self._history)
        alert = alert_of(status, ())
        if alert is None or alert in self.delivered:
            return status.state, True
        return status.state, self._send(alert_of(status, explain_status(status)) or alert)

    def watch(self, every: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Look every so many seconds until the run is complete and that is delivered."""
        while True:
            state, sent = self.look()
            if state == "finished" and sent:
                return True
            sleep(every)

    def _send(self, alert: Alert) -> bool:
        what = f"{alert.body['event']}, step {alert.body['global_step']}"
        try:
            deliver(self.receiver, alert.body, self.waits)
        except UndeliveredError as error:
            self.say(f"not delivered ({what}): {error}")
            return False
        kept = self.delivered.add(alert)
        self.say(f"delivered: {what}" + ("" if kept else f" (could not be noted in {self.run.logs})"))
        return True
