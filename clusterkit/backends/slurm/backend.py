"""Runs as jobs of Slurm, whose folders lie on its shared file system."""

from __future__ import annotations

from collections.abc import Sequence

from clusterkit.backends.base import PlannedRun, RunOutcome, RunRequest, SubmittedRun, completed
from clusterkit.backends.folder import FolderBackend
from clusterkit.backends.local.stop import process_run
from clusterkit.backends.slurm.follow import follow
from clusterkit.backends.slurm.script import SlurmOptions
from clusterkit.backends.slurm.stop import cancel, job_run
from clusterkit.backends.slurm.submit import SlurmPlan, attach, options_here, plan, request_for, require_slurm, submit
from clusterkit.backends.stop import end_run
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.slurm.commands import has_slurm
from clusterkit.runs.slurm.queue import job_of
from clusterkit.ui.progress import Progress


class SlurmBackend(FolderBackend):
    """`clusterkit.backends.base.Backend` of Slurm. `Place.options` are `SlurmOptions`."""

    where = "on Slurm"

    def request(self, preset: str | None, task: str | None, settings: Sequence[str]) -> RunRequest:
        """See `Backend.request`."""
        require_slurm()
        return request_for(resolve(preset, task, settings))

    def attach(self, request: RunRequest) -> SubmittedRun | None:
        """See `Backend.attach`."""
        return attach(request)

    def plan(self, request: RunRequest) -> PlannedRun:
        """See `Backend.plan`."""
        assert isinstance(self.place.options, SlurmOptions)
        return plan(request, options_here(self.place.options))

    def start(self, planned: PlannedRun) -> SubmittedRun:
        """See `Backend.start`."""
        assert isinstance(planned, SlurmPlan)
        return submit(planned, self.say)

    def follow(self, submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
        """See `Backend.follow`."""
        return completed(submitted.run) if submitted.state == "complete" else follow(submitted, progress, again)

    def end(self, run: RunDirectory, *, deadline: float, force: bool) -> str:
        """See `FolderBackend.end`: its job, or the process that trains it without one."""
        job = job_of(run) if has_slurm() else None
        if job is not None and job.waiting:
            cancel(job.number)
            return (
                f"{run.experiment}/{run.trial} was waiting for nodes, and its job {job.number} is cancelled; the same "
                "train command submits it"
            )
        return end_run(
            process_run(run) if job is None else job_run(run, job), deadline=deadline, force=force, say=self.say
        )
