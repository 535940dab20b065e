"""The content of a page from a log alone, where there is no run's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterkit.observe.report.source import Restart, Run
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.metrics import number, whole
from clusterkit.runs.log.view import LogView
from clusterkit.runs.status import Status
from trainer.errors import RunError

_STATES = {"silent": "stalled", "empty": "new"}
"""States of a log that a run calls differently."""


@dataclass(frozen=True)
class LogDirectory(RunDirectory):
    """The directory of a run of which only the log is there: no other file is found in it."""

    @property
    def logs(self) -> Path:
        """The log itself."""
        return self.fileroot


class LogRun(Run):
    """A run by its log.

    Raises:
        RunError: the log is not one of a run.
    """

    def __init__(self, view: LogView) -> None:
        if view.state == "unknown":
            raise RunError(view.message)
        stem = "standard input" if view.name == "standard input" else view.path.name
        super().__init__(LogDirectory(view.path, "", "log", stem), view.history)
        self._view = view
        self.restarts = [
            Restart(whole(attempt, "attempt"), number(attempt, "time"), whole(attempt, "resume_step"), 0, "")
            for attempt in view.history.attempts[1:]
        ]
        self.warnings = [event for event in view.history.events if event["kind"] == "warning"]
        self.records = len(view.history.steps)

    @property
    def name(self) -> str:
        """The log's name."""
        return self.directory.trial

    def status(self, now: float) -> Status:
        """Return the state of the run as its log shows it."""
        view, state = self._view, _STATES.get(self._view.state, self._view.state)
        return Status(self.directory, view.history, state, view.message, None, view.history.total_steps, now)
