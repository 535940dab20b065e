"""Runs as jobs of Slurm, whose folders lie on its shared file system."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.base import (
    Job,
    PlannedRun,
    RunOutcome,
    RunRequest,
    StoppedRun,
    SubmittedRun,
    completed,
    folder_of_runs,
    outcome_of_job,
)
from clusterkit.backends.folder import FolderBackend
from clusterkit.backends.local.stop import process_run
from clusterkit.backends.slurm.script import SlurmOptions
from clusterkit.backends.slurm.submit import SlurmPlan, attach, options_here, plan, request_for, require_slurm, submit
from clusterkit.backends.stop import LiveRun, end_run
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory, resume_hint
from clusterkit.runs.final_evaluation import read_summary
from clusterkit.runs.log.metrics import History, MetricsTail
from clusterkit.runs.slurm.commands import SlurmError, has_slurm, slurm
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, find_job, job_of, queued_jobs
from clusterkit.runs.slurm.queue_state import startup_failure, waiting_text
from clusterkit.ui.progress import Progress

POLL_SECONDS = 1.0
LOOK_SECONDS = 5.0
"""Between questions to the controller."""


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
        return completed(submitted.run) if submitted.state == "complete" else _follow(submitted, progress, again)

    def jobs(self) -> list[Job]:
        """See `Backend.jobs`: those in the queue."""
        folder = "" if self.place.fileroot is None else f"{folder_of_runs(self.place.fileroot)}/logs/"
        return [_listed(job) for job in queued_jobs() if job.run_dir.startswith(folder)]

    def end(self, run: RunDirectory, *, deadline: float, force: bool) -> StoppedRun:
        """See `FolderBackend.end`: its job, or the process that trains it without one."""
        job = job_of(run) if has_slurm() else None
        if job is not None and job.waiting:
            _cancel(job.number)
            message = f"{run.name} was waiting for nodes, and its job {job.number} is cancelled; the same train"
            return StoppedRun(run.name, False, f"{message} command submits it")
        return end_run(
            process_run(run) if job is None else _live_run(run, job), deadline=deadline, force=force, say=self.say
        )


def _listed(job: SlurmJob) -> Job:
    """As `clusterkit jobs` shows it."""
    return Job(
        job.number,
        "PENDING" if job.waiting else "RUNNING",
        waiting_text(job) if job.waiting else "",
        job.started,
        user=job.user,
        experiment=Path(job.run_dir).parent.name,
        trial=job.trial,
        run_dir=job.run_dir,
    )


def _follow(submitted: SubmittedRun, progress: Progress, again: str) -> RunOutcome:
    """Watch its records, which lie on the shared file system, and the queue until its job ends."""
    run, number = submitted.run, submitted.submission_id
    tail, history, last_message, last_look = MetricsTail(run.metrics), History(), "", 0.0
    job: SlurmJob | None = None
    known = submitted.knows_records
    while True:
        alive = True
        if time.monotonic() - last_look > LOOK_SECONDS:
            last_look = time.monotonic()
            try:
                job = find_job(number)
                alive = job is not None and job.alive
                message = waiting_text(job) if job is not None and job.waiting else ""
            except SlurmError as error:
                message = f"{error}; trying again, the run goes on without us"
            if message and message != last_message:
                progress.say(message)
            last_message = message
        news = tail.read()
        history.extend(news)
        progress.show(history, [] if known else news)
        known = False
        if not alive:
            return _outcome(submitted, history, job, again)
        time.sleep(POLL_SECONDS)


def _outcome(submitted: SubmittedRun, history: History, job: SlurmJob | None, again: str) -> RunOutcome:
    run, number = submitted.run, submitted.submission_id
    state = "forgotten by Slurm" if job is None else job.state
    log = run.logs / FOLDER / f"job_{number}.log"
    ended = f"job {number} ended ({state}); what it printed is in {log}"
    if not run.attempt_numbers() and log.exists():
        ended = f"{startup_failure(log)}\nSlurm's word: {state}"
    done = job is None or job.state == "COMPLETED"
    return outcome_of_job(history, done=done, ended=ended, summary=lambda: read_summary(run), again=again)


def _live_run(run: RunDirectory, job: SlurmJob) -> LiveRun:
    """A living run that is a Slurm job. Its functions raise SlurmError where Slurm does not answer."""

    def kill() -> None:
        _cancel("--full", "--signal=KILL", job.number)
        _cancel(job.number)

    return LiveRun(
        f"{run.name} (job {job.number})",
        # To the script alone: with a plain scancel Ray would end under the trainer, and with it the last checkpoint.
        interrupt=lambda: _cancel("--batch", "--signal=TERM", job.number),
        kill=kill,
        alive=lambda: (seen := find_job(job.number)) is not None and seen.alive,
        resume_hint=lambda: resume_hint(run.has_recover_checkpoint, run.keeps_supervised),
        stuck=lambda: f"scontrol show job {job.number} tells its state",
        poll_seconds=2.0,
    )


def _cancel(*arguments: str) -> None:
    """Call scancel; a job that has just ended is no error."""
    try:
        slurm(["scancel", *arguments])
    except SlurmError as error:
        if "Invalid job id" not in error.output and "already complet" not in error.output:
            raise
