"""What all backends share whose runs lie in a folder that this machine sees."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any, Self

from clusterkit.backends.base import Log, LogName, Observation, Place, RunSelector, Say, StoppedRun
from clusterkit.backends.records import Runs
from clusterkit.backends.stop import require_one
from clusterkit.backends.table import mode_of, open_backend
from clusterkit.backends.words_here import words_here
from clusterkit.runs.diagnose.model import BAD
from clusterkit.runs.diagnose.view import findings_of
from clusterkit.runs.directory import RunDirectory, folder_of_runs, runs
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.status import find_run, observe
from clusterkit.runs.train_command import recorded_command
from clusterkit.ui.run_status import status_lines
from trainer.errors import RunError


class FolderBackend:
    """Finds, shows and stops runs in a folder; a subclass starts and follows them."""

    where = ""

    def __init__(self, place: Place, say: Say) -> None:
        self.place, self.say = place, say
        self.stack = ExitStack()
        self._watched: dict[RunSelector, tuple[RunDirectory, MetricsTail, History]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.stack.__exit__(*failure)  # what holds a run notes why it is let go

    def words(self, run: RunDirectory) -> str:
        """See `Backend.words`."""
        return words_here(run)

    def end(self, run: RunDirectory, *, deadline: float, force: bool) -> StoppedRun:
        """End a living run that was started with this backend; see `Backend.stop`."""
        raise NotImplementedError

    def stop(self, selector: RunSelector, *, deadline: float, force: bool) -> StoppedRun:
        """See `Backend.stop`."""
        folder = folder_of_runs(self.place.fileroot)
        alive = [run for run in runs(folder, selector.experiment, selector.trial, selector.user) if holder_of(run)]
        if not alive:
            named = f" {selector}" if selector.experiment or selector.trial else ""
            raise RunError(
                f"no run{named} under {folder} is alive (--fileroot FOLDER for another folder, --cluster NAME)"
            )
        require_one([run.name for run in alive])
        with open_backend(Place(mode_of(alive[0]), fileroot=self.place.fileroot), self.say) as owner:
            assert isinstance(owner, FolderBackend)
            return owner.end(alive[0], deadline=deadline, force=force)

    def log(self, selector: RunSelector, name: LogName, *, patient: bool = False) -> Log:  # noqa: ARG002 (it is here)
        """See `Backend.log`. The file is held open: one that is renamed meanwhile is read to its end."""
        run = self._find(selector)
        path = name.path(run, (run.attempt_numbers() or [0])[-1])
        try:
            file = self.stack.enter_context(path.open("rb", buffering=0)).fileno()
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from error
        return Log(path, lambda: os.fstat(file).st_size, lambda offset, most: os.pread(file, most, offset))

    def status(self, selector: RunSelector) -> Observation:
        """See `Backend.status`."""
        if selector not in self._watched:
            run = self._find(selector)
            self._watched[selector] = run, MetricsTail(run.metrics), History()
        run, tail, history = self._watched[selector]  # what was read before is not read again: it may take seconds
        history.extend(tail.read())
        seen = observe(run, time.time(), history)
        facts = {**seen.as_dict(), "diagnosis": findings_of(seen)}
        lines = status_lines(seen, self.words(run), recorded_command(seen.history, run))
        return Observation(facts, lines, int(seen.state in BAD), not seen.alive)

    def runs(self, fileroot: str | None = None) -> Runs:
        """See `Backend.runs`."""
        return Runs(folder_of_runs(fileroot or self.place.fileroot))

    def _find(self, selector: RunSelector) -> RunDirectory:
        return find_run(folder_of_runs(self.place.fileroot), selector.experiment, selector.trial, selector.user)
