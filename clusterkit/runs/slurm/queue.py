"""Our jobs in Slurm's queue. A job's name carries what the run is, its working directory where the run lies."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.slurm.commands import SlurmError, has_slurm, slurm

PREFIX = "clusterkit"
FOLDER = "slurm"
"""In a run's folder: the script, the token of its Ray, what its jobs printed."""
FRESH_SECONDS = 1.0
"""A queue that was read so short a time ago is not asked for again: controllers of big clusters have much to do."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED: tuple[str, ...] = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
)
_ENDED += ("REVOKED", "TIMEOUT")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job of ours. state: Slurm's word, such as PENDING. reason: why it is in that state, in Slurm's words.

    run_dir: log folder of its run. code: exit code of its script, where it has ended.
    """

    number: str
    state: str
    reason: str
    fingerprint: str
    run_dir: str
    code: int = 0

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
        """Trial of its run."""
        return Path(self.run_dir).name


def job_name(run: RunDirectory, fingerprint: str) -> str:
    """Name that a run's job is submitted under."""
    return f"{PREFIX}:{run.experiment}:{run.trial}:{fingerprint}"


_seen: tuple[float, list[SlurmJob]] = (0.0, [])


def our_jobs(*, fresh: bool = True) -> list[SlurmJob]:
    """Living jobs that this user has submitted with clusterkit. fresh: not those seen a moment ago.

    Raises:
        SlurmError: Slurm does not answer.

    """
    global _seen  # noqa: PLW0603
    if not fresh and time.monotonic() - _seen[0] < FRESH_SECONDS:
        return _seen[1]
    said = slurm(["squeue", "--noheader", f"--user={user_name()}", "--format=%i|%T|%r|%j|%Z"])
    jobs = []
    for line in said.splitlines():
        number, state, reason, name, folder = line.split("|", 4)
        parts = name.split(":")
        if parts[0] == PREFIX and len(parts) == 4:
            jobs.append(SlurmJob(number.strip(), state, reason, parts[3], folder))
    jobs = [job for job in jobs if job.alive]
    _seen = (time.monotonic(), jobs)
    return jobs


def job_of(run: RunDirectory, *, fresh: bool = True) -> SlurmJob | None:
    """The living job that works on a run, or is to.

    Raises:
        SlurmError: Slurm does not answer.

    """
    return next((job for job in our_jobs(fresh=fresh) if job.run_dir == str(run.logs)), None)


def is_slurms(run: RunDirectory) -> bool:
    """Whether the run has ever been submitted to Slurm."""
    return (run.logs / FOLDER).is_dir()


def holder_of(run: RunDirectory) -> str | None:
    """Which Slurm job keeps a run busy; None where none does. Locks do not tell: the job may be on another machine."""
    if not is_slurms(run):
        return None
    try:
        job = job_of(run, fresh=False) if has_slurm() else None
        if job is not None:
            return f"Slurm job {job.number}"
    except SlurmError:
        return None if _has_ended(run) else "a Slurm job (the controller does not answer)"
    return "a Slurm job (there is no squeue here to ask about it)" if not has_slurm() and not _has_ended(run) else None


def look(number: str) -> SlurmJob | None:
    """A job by its number, for some minutes after its end as well; None where Slurm has forgotten it.

    Raises:
        SlurmError: Slurm does not answer.

    """
    try:
        said = slurm(["scontrol", "--oneliner", "show", "job", number])
    except SlurmError as error:
        if "Invalid job id" in error.said:
            return None
        raise
    fields = dict(word.split("=", 1) for word in said.split() if "=" in word)
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


def _has_ended(run: RunDirectory) -> bool:
    """Whether the last attempt has left its mark, or there was none."""
    numbers = run.attempt_numbers()
    return not numbers or (run.logs / f"attempt_{numbers[-1]}" / "exit.json").exists()
