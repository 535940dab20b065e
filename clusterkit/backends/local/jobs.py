"""What processes of this machine work on, by the locks that they hold."""

from __future__ import annotations

import os
from pathlib import Path

from clusterkit.backends.base import Job
from clusterkit.runs.directory import lock_holder, runs, user_name
from evaluation.record import LOCK


def training_jobs(fileroot: Path) -> list[Job]:
    """Runs of all users in a folder of runs."""
    found = []
    for user in (path.name for path in (fileroot / "logs").glob("*")):
        for run in runs(fileroot, user=user):
            for lock in (run.logs / "launch.lock", run.logs / "run.lock"):
                if (job := _job(lock, user, run.experiment, run.trial, str(run.logs))) is not None:
                    found.append(job)
                    break
    return found


def evaluation_jobs(folder: Path) -> list[Job]:
    """Evaluations whose --out is in a folder."""
    found = [_job(lock, owner_of(lock), "eval", lock.parent.name) for lock in folder.glob(f"*/{LOCK}")]
    return [job for job in found if job is not None]


def owner_of(file: Path) -> str:
    """The user that a file belongs to."""
    number = file.stat().st_uid
    try:
        return user_name() if number == os.getuid() else file.owner()
    except KeyError:
        return str(number)


def _job(lock: Path, user: str, experiment: str, trial: str, run_dir: str | None = None) -> Job | None:
    """The job that holds a lock, which it took when it began; None for a free one."""
    if (holder := lock_holder(lock)) is None:
        return None
    started = lock.stat().st_mtime
    return Job(holder, "RUNNING", started=started, user=user, experiment=experiment, trial=trial, run_dir=run_dir)
