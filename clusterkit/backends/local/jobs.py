"""What processes of this machine work on, by the locks that they hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.base import Job
from clusterkit.runs.directory import lock_holder, runs, user_name
from evaluation.record import LOCK


def training_jobs(fileroot: Path) -> list[Job]:
    """Runs of all users in a folder of runs."""
    found = []
    for user in (path.name for path in (fileroot / "logs").glob("*")):
        for run in runs(fileroot, user=user):
            # The trainer's process names it, as in `status`; its command's began before.
            locks = (run.logs / "run.lock", run.logs / "launch.lock")
            found.append(_job(locks, user, run.experiment, run.trial, str(run.logs)))
    return [job for job in found if job is not None]


def evaluation_jobs(folder: Path) -> list[Job]:
    """Evaluations whose --out is in a folder."""
    found = [_job((lock,), owner_of(lock), "eval", lock.parent.name) for lock in folder.glob(f"*/{LOCK}")]
    return [job for job in found if job is not None]


def owner_of(file: Path) -> str:
    """The user that a file belongs to."""
    number = file.stat().st_uid
    try:
        return user_name() if number == os.getuid() else file.owner()
    except KeyError:
        return str(number)


def _job(locks: Sequence[Path], user: str, experiment: str, trial: str, run_dir: str | None = None) -> Job | None:
    """The job whose processes hold these locks, named by the first that is held; None where all are free.

    It began when the oldest was taken.
    """
    held = [(holder, lock.stat().st_mtime) for lock in locks if (holder := lock_holder(lock)) is not None]
    if not held:
        return None
    started = min(taken for _, taken in held)
    return Job(held[0][0], "RUNNING", started=started, user=user, experiment=experiment, trial=trial, run_dir=run_dir)
