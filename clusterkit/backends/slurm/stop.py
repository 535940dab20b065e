"""End a run that is a Slurm job."""

from __future__ import annotations

from clusterkit.backends.stop import LiveRun
from clusterkit.runs.directory import RunDirectory, resume_hint
from clusterkit.runs.slurm.commands import SlurmError, slurm
from clusterkit.runs.slurm.queue import SlurmJob, find_job


def job_run(run: RunDirectory, job: SlurmJob) -> LiveRun:
    """A living run that is a Slurm job. Its functions raise SlurmError where Slurm does not answer."""

    def kill() -> None:
        cancel("--full", "--signal=KILL", job.number)
        cancel(job.number)

    return LiveRun(
        f"{run.experiment}/{run.trial} (job {job.number})",
        # To the script alone: with a plain scancel Ray would end under the trainer, and with it the last checkpoint.
        interrupt=lambda: cancel("--batch", "--signal=TERM", job.number),
        kill=kill,
        alive=lambda: (seen := find_job(job.number)) is not None and seen.alive,
        resume_hint=lambda: resume_hint(run.has_recover_checkpoint),
        stuck=lambda: f"scontrol show job {job.number} tells its state",
        poll_seconds=2.0,
    )


def cancel(*arguments: str) -> None:
    """Call scancel; a job that has just ended is no error."""
    try:
        slurm(["scancel", *arguments])
    except SlurmError as error:
        if "Invalid job id" not in error.output and "already complet" not in error.output:
            raise
