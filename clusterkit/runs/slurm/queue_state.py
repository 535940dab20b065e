"""The state of a run with what Slurm knows: its job waits, or ended before the trainer began."""

from __future__ import annotations

from pathlib import Path

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.tail import last_lines
from clusterkit.runs.slurm.commands import SlurmError, has_slurm
from clusterkit.runs.slurm.queue import FOLDER, SlurmJob, job_of, was_submitted

SHOWN_LINES = 8


def with_queue_state(run: RunDirectory, state: str, message: str) -> tuple[str, str]:
    """Return a run's state and message, replaced by Slurm's if that knows more than the run's records."""
    if not was_submitted(run):
        return state, message
    try:
        job = job_of(run, fresh=False) if has_slurm() else None
    except SlurmError:
        return state, message
    if job is not None and job.waiting:
        return "pending", waiting_text(job)
    if state == "new" and (log := newest_log(run)) is not None and job is None:
        return "failed", startup_failure(log)
    return state, message


def waiting_text(job: SlurmJob) -> str:
    """Return why a job has no nodes yet."""
    return f"Slurm job {job.number} waits for nodes: {job.reason} (squeue --start --job {job.number} estimates when)"


def newest_log(run: RunDirectory) -> Path | None:
    """Return the log of the newest job of a run, or None."""
    logs = [path for path in (run.logs / FOLDER).glob("job_*.log") if path.stem.removeprefix("job_").isdigit()]
    return max(logs, key=lambda path: int(path.stem.removeprefix("job_")), default=None)


def startup_failure(log: Path) -> str:
    """Return the message about a job that ended before the trainer began, with the last lines of its log."""
    lines = "\n".join(f"  {line}" for line in last_lines(log, SHOWN_LINES))
    return f"Slurm job {log.stem.removeprefix('job_')} ended before the training began ({log}):\n{lines}".rstrip(":\n")
