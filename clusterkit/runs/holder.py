"""Find the process that works on a run: of this machine, a Slurm job, or of another machine."""

from __future__ import annotations

from clusterkit.runs.directory import HOLDER_FILE, RunDirectory, lock_holder
from clusterkit.runs.slurm import queue


def holder_of(run: RunDirectory) -> str | None:
    """Return who works on a run ("process 123"), or None.

    The trainer holds run.lock; `clusterkit train` holds launch.lock already before it starts the trainer.
    """
    for name in ("run.lock", "launch.lock"):
        holder = lock_holder(run.logs / name)
        if holder:
            return holder
    if job := queue.holder_of(run):
        return job
    try:
        return (run.logs / HOLDER_FILE).read_text(encoding="utf-8") or None
    except OSError:
        return None
