"""Runs as processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterkit.backends.base import (
    Job,
    PlannedRun,
    RunOutcome,
    RunRequest,
    StoppedRun,
    SubmittedRun,
    applied,
    completed,
    folder_of_runs,
)
from clusterkit.backends.folder import FolderBackend
from clusterkit.backends.local.interpreter import gpu_python
from clusterkit.backends.local.jobs import evaluation_jobs, training_jobs
from clusterkit.backends.local.launch import require_writable, trainer_command
from clusterkit.backends.local.stop import process_run
from clusterkit.backends.local.train import Restarts, follow, prepared
from clusterkit.backends.stop import end_run
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.trials import TrialState, choose_trial
from clusterkit.ui.progress import Progress
from trainer.config import RunConfig


class LocalBackend(FolderBackend):
    """`clusterkit.backends.base.Backend` of this machine. A run is held from its start to the end of `follow`."""

    _config: RunConfig
    _attempt: int

    def request(self, preset: str | None, task: str | None, settings: Sequence[str]) -> RunRequest:
        """See `Backend.request`."""
        resolved = resolve(preset, task, settings)
        return RunRequest(resolved.config, resolved.trial_is_named)

    def attach(self, request: RunRequest) -> None:
        """A process of another command cannot be followed: `start` refuses, and says how to watch it."""

    def plan(self, request: RunRequest) -> PlannedRun:
        """See `Backend.plan`."""
        trial = choose_trial(request.config, request.named)
        require_writable(trial.run)
        config = applied(request.config, trial, self.say).model_copy(update={"trial_name": trial.run.trial})
        return PlannedRun(replace(request, config=config), trial)

    def start(self, planned: PlannedRun) -> SubmittedRun:
        """Hold the run and make its next attempt; `follow` is what trains."""
        trial = planned.trial
        assert trial is not None
        if trial.state is TrialState.COMPLETE:
            return SubmittedRun("complete", trial.run)
        self._config = planned.request.config
        self._attempt = self.stack.enter_context(prepared(trial.run, self._config, trial))
        return SubmittedRun("started", trial.run, resume_step=trial.resume_step)

    def follow(self, submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
        """See `Backend.follow`."""
        run = submitted.run
        if submitted.state == "complete":
            return completed(run)
        with self.stack.pop_all():
            python = gpu_python() if self._config.gpus else sys.executable
            command = trainer_command(run, python)
            return follow(run, command, self._attempt, progress, again, Restarts.of(self._config))

    def jobs(self) -> list[Job]:
        """See `Backend.jobs`: what is at work; evaluations are those of the folder that the command is typed in."""
        found = [*training_jobs(folder_of_runs(self.place.fileroot)), *evaluation_jobs(Path.cwd())]
        return sorted(found, key=lambda job: job.started or 0.0)

    def end(self, run: RunDirectory, *, deadline: float, force: bool) -> StoppedRun:
        """See `FolderBackend.end`."""
        return end_run(process_run(run), deadline=deadline, force=force, say=self.say)
