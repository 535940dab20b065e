"""Our jobs in Slurm's queue. A job's name identifies the run, its working directory is the run's folder.

What asks for jobs raises SlurmError where Slurm does not answer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.slurm.commands import SlurmError, has_slurm, slurm

PREFIX = "clusterkit"
FOLDER = "slurm"
"""Folder in a run's folder with the script, the token of its Ray, and the logs of its jobs."""
FRESH_SECONDS = 1.0
"""A queue is not read twice within this time: controllers of big clusters are busy."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job of ours."""

    number: str
    state: str  # in Slurm's terms, such as PENDING
    reason: str  # of that state, in Slurm's terms
    fingerprint: str
    run_dir: str  # log folder of its run
    code: int = 0  # exit code of its script, once it has ended
    user: str = ""  # whose it is
    started: float | None = None  # Unix seconds; None while it waits

    @property
    def alive(self) -> bool:
        """Whether it waits or runs."""
        return self.state not in _ENDED

    @property
    def waiting(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in _WAITING

    @property
    def trial(self) -> str:
        """The trial of its run."""
        return Path(self.run_dir).name


def job_name(run: RunDirectory, fingerprint: str) -> str:
    """Return the name of a run's job."""
    return f"{PREFIX}:{run.experiment}:{run.trial}:{fingerprint}"


_seen: dict[str, tuple[float, list[SlurmJob] | SlurmError]] = {}


def forget_queue() -> None:
    """Ask again at the next look: a job was submitted."""
    _seen.clear()


def our_jobs(user: str | None = None, *, fresh: bool = True) -> list[SlurmJob]:
    """Return a user's jobs of clusterkit that wait or run; without `fresh` perhaps as of a second ago."""
    user = user or user_name()
    looked, jobs = _seen.get(user, (-FRESH_SECONDS, []))
    if fresh or time.monotonic() - looked >= FRESH_SECONDS:
        try:
            jobs = queued_jobs(user)
        except SlurmError as error:  # not asked again for each of many runs: it may have taken two minutes
            jobs = error
        _seen[user] = (time.monotonic(), jobs)
    if isinstance(jobs, SlurmError):
        raise jobs
    return jobs


def queued_jobs(user: str | None = None) -> list[SlurmJob]:
    """Return clusterkit's jobs that wait or run, of one user or of all, the oldest first."""
    whose = [] if user is None else [f"--user={user}"]
    command = ["squeue", "--noheader", "--sort=i", *whose, "--format=%i|%T|%r|%j|%u|%S|%Z"]
    queue = slurm(command, {**os.environ, "SLURM_TIME_FORMAT": "%s"})
    jobs = []
    for line in queue.splitlines():
        number, state, reason, name, owner, start, folder = line.split("|", 6)
        parts = name.split(":")
        if parts[0] == PREFIX and len(parts) == 4:
            job = SlurmJob(number.strip(), state, reason, parts[3], folder, user=owner)
            # That of a job which waits is Slurm's estimate.
            jobs.append(job if job.waiting or not start.isdigit() else replace(job, started=float(start)))
    return [job for job in jobs if job.alive]


def job_of(run: RunDirectory, *, fresh: bool = True) -> SlurmJob | None:
    """Return the job of a run that waits or runs, or None."""
    return next((job for job in our_jobs(run.user, fresh=fresh) if job.run_dir == str(run.logs)), None)


def was_submitted(run: RunDirectory) -> bool:
    """Whether the run was ever submitted to Slurm."""
    return (run.logs / FOLDER).is_dir()


def holder_of(run: RunDirectory) -> str | None:
    """Return the Slurm job that works on a run, or None. Locks cannot tell: the job may be on another machine."""
    if not was_submitted(run):
        return None
    try:
        job = job_of(run, fresh=False) if has_slurm() else None
        if job is not None:
            return f"Slurm job {job.number}"
    except SlurmError:
        return None if run.has_ended else "a Slurm job (the controller does not answer)"
    return "a Slurm job (there is no squeue here to ask about it)" if not has_slurm() and not run.has_ended else None


def find_job(number: str) -> SlurmJob | None:
    """Return a job by its number, also for some minutes after its end; None if Slurm has forgotten it."""
    try:
        shown = slurm(["scontrol", "--oneliner", "show", "job", number])
    except SlurmError as error:
        if "Invalid job id" in error.output:
            return None
        raise
    fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    name = fields.get("JobName", "").split(":")
    code, _, number_of_signal = fields.get("ExitCode", "0:0").partition(":")
    return SlurmJob(
        number,
        fields.get("JobState", ""),
        fields.get("Reason", ""),
        name[-1],
        fields.get("WorkDir", ""),
        int(code) or (128 + int(number_of_signal) if int(number_of_signal or 0) else 0),
    )
