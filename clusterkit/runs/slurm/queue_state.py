"""What Slurm adds to what a run's own records tell: that its job waits, and why, or ended before the trainer began."""

from __future__ import annotations

from pathlib import Path

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.console import last_lines
from clusterkit.runs.slurm.commands import SlurmError, has_slurm
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, is_slurms, job_of

SHOWN_LINES = 8


def with_queue_state(run: RunDirectory, state: str, message: str) -> tuple[str, str]:
    """A run's state and why, as its records tell, with Slurm's word where that says more."""
    if not is_slurms(run):
        return state, message
    try:
        job = job_of(run, fresh=False) if has_slurm() else None
    except SlurmError:
        return state, message
    if job is not None and job.waiting:
        return "pending", waiting_text(job)
    if state == "new" and (log := newest_log(run)) is not None and job is None:
        return "failed", before_training(log)
    return state, message


def waiting_text(job: SlurmJob) -> str:
    """Why a job has no nodes yet."""
    return f"Slurm job {job.number} waits for nodes: {job.reason} (squeue --start --job {job.number} estimates when)"


def newest_log(run: RunDirectory) -> Path | None:
    """What the newest job of a run printed."""
    logs = [path for path in (run.logs / FOLDER).glob("job_*.log") if path.stem.removeprefix("job_").isdigit()]
    return max(logs, key=lambda path: int(path.stem.removeprefix("job_")), default=None)


def before_training(log: Path) -> str:
    """Message about a job that ended before the trainer began: its own last words."""
    lines = "\n".join(f"  {line}" for line in last_lines(log, SHOWN_LINES))
    return f"Slurm job {log.stem.removeprefix('job_')} ended before the training began ({log}):\n{lines}".rstrip(":\n")
