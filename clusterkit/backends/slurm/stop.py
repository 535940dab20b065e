"""End a Slurm job: a recover checkpoint first, and by force only after a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from clusterkit.runs.directory import RunDirectory, resume_hint
from clusterkit.runs.slurm.commands import SlurmError, slurm
from clusterkit.runs.slurm.queue import SlurmJob, find_job
from trainer.errors import RunError

POLL_SECONDS = 2.0
KILL_SECONDS = 120.0


def stop_job(run: RunDirectory, job: SlurmJob, *, deadline: float, force: bool, say: Callable[[str], None]) -> str:
    """End the job; how that went, as a sentence.

    Args:
        run: whose. job: alive. deadline: seconds until it is ended by force. force: at once. say: told what is being
            waited for.

    Raises:
        SlurmError: Slurm refuses or does not answer. RunError: the job outlives even force.

    """
    name = f"{run.experiment}/{run.trial}"
    if job.waiting:
        _cancel(job.number)
        return f"{name} was waiting for nodes, and its job {job.number} is cancelled; the same train command submits it"
    if not force:
        # To the script alone: with a plain scancel Ray would end under the trainer, and with it the last checkpoint.
        _cancel("--batch", "--signal=TERM", job.number)
        say(f"{name} (job {job.number}) writes a recover checkpoint and ends; by force after {deadline:.0f} s")
        if _ended(job.number, deadline):
            return f"{name} is stopped; {resume_hint(run.has_recover_checkpoint)}"
    _cancel("--full", "--signal=KILL", job.number)
    _cancel(job.number)
    if not _ended(job.number, KILL_SECONDS):
        raise RunError(f"{name} does not end even by force: scontrol show job {job.number} tells its state")
    return f"{name} was ended by force; {resume_hint(run.has_recover_checkpoint)}"


def _cancel(*arguments: str) -> None:
    try:
        slurm(["scancel", *arguments])
    except SlurmError as error:
        if "Invalid job id" not in error.output and "already complet" not in error.output:  # it has just ended
            raise


def _ended(number: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while (job := find_job(number)) is not None and job.alive:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True
