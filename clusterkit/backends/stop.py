"""End a training whose folder is on this machine: a process of it, or a job in Slurm's queue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.local.stop import stop_process
from clusterkit.backends.slurm.stop import stop_job
from clusterkit.runs.directory import runs
from clusterkit.runs.holder import holder_of
from clusterkit.runs.slurm.commands import has_slurm
from clusterkit.runs.slurm.queue import job_of, was_submitted
from trainer.errors import RunError, UserError


def stop_run(
    fileroot: Path,
    experiment: str | None,
    trial: str | None,
    *,
    deadline: float,
    force: bool,
    say: Callable[[str], None],
    user: str | None = None,
) -> str:
    """End the run of that name that is alive; how that went, as a sentence.

    Args:
        fileroot: where runs are.
        experiment: which; None where only one is alive.
        trial: likewise.
        deadline: seconds until it is ended by force.
        force: at once.
        say: told what is being waited for.
        user: whose; None for ours.

    Raises:
        RunError: none is alive, or it cannot be ended. UserError: several are alive.

    """
    alive = [run for run in runs(fileroot, experiment, trial, user) if holder_of(run)]
    if not alive:
        wanted = f" {experiment or '*'}/{trial or '*'}" if experiment or trial else ""
        raise RunError(f"no run{wanted} under {fileroot} is alive (--fileroot DIR for another folder, --cluster NAME)")
    if len(alive) > 1:
        names = ", ".join(f"{run.experiment}/{run.trial}" for run in alive)
        raise UserError(f"several runs are alive: {names}. Name one with --experiment and --trial")
    (run,) = alive
    if was_submitted(run) and has_slurm() and (job := job_of(run)) is not None:
        return stop_job(run, job, deadline=deadline, force=force, say=say)
    return stop_process(run, deadline=deadline, force=force, say=say)
