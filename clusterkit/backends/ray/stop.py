"""End a dispatched run: a recover checkpoint first, and by force only after a deadline."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.jobs import RayJob, RayJobs
from clusterkit.provision import docker
from clusterkit.provision.ray.model import HEAD, LABEL_CLUSTER, LABEL_ROLE
from clusterkit.runs.directory import RunDirectory, resume_hint
from clusterkit.ssh.shell import first_of
from trainer.errors import RunError

POLL_SECONDS = 1.0
KILL_SECONDS = 60.0
TRAINS = "clusterkit-train"
"""Kind of a job that trains."""


def matching_jobs(jobs: list[RayJob], user: str, experiment: str | None, trial: str | None) -> list[RayJob]:
    """Living runs of that user with that name, or all of theirs."""
    return [
        job
        for job in jobs
        if job.alive
        and job.metadata.get("kind") == TRAINS
        and job.user == user
        and experiment in (None, job.metadata.get("experiment"))
        and trial in (None, job.metadata.get("trial"))
    ]


def of_others(jobs: list[RayJob], user: str) -> list[RayJob]:
    """Living jobs that are not that user's, whatever they do."""
    return [job for job in jobs if job.alive and job.user != user]


async def stop(
    head: Head, jobs: RayJobs, job: RayJob, *, deadline: float, force: bool, say: Callable[[str], None]
) -> str:
    """End the job; how that went, as a sentence.

    Args:
        head: where it runs. jobs: Ray's API. job: which. deadline: seconds until it is ended by force. force: at once.
        say: told what is being waited for.

    Raises:
        RunError: Ray does not answer, or the job outlives even force. HostError: the head is lost.

    """
    name = job.run
    if not force:
        await jobs.stop(job.submission_id)
        say(f"{name} writes a recover checkpoint and ends; by force after {deadline:.0f} s")
        if await _ended(jobs, job.submission_id, deadline):
            return f"{name} is stopped; {await _goes_on(head, job)}"
    # Ray waits as long as it was told when the job was submitted: only the processes themselves can be hurried.
    config = re.escape(f"{job.metadata.get('run_dir', '')}/config.yaml")
    script = (
        first_of(docker.ps(f"label={LABEL_CLUSTER}={head.cluster.name}", f"label={LABEL_ROLE}={HEAD}"))
        + f'exec docker exec "$id" pkill -KILL -f -- {shlex.quote("trainer.* " + config)}\n'
    )
    await head.session.run(script, root=True, timeout=KILL_SECONDS)
    if not await _ended(jobs, job.submission_id, KILL_SECONDS):
        raise RunError(f"{name} does not end even by force: clusterkit down ends all of the cluster's Ray")
    return f"{name} was ended by force; {await _goes_on(head, job)}"


async def _goes_on(head: Head, job: RayJob) -> str:
    """What the same train command does now. Raises HostError: the head is lost."""
    logs = Path(job.metadata["run_dir"])
    run = RunDirectory(logs.parents[3], *logs.parts[-3:])
    found = await head.session.run(f"test -e {shlex.quote(str(run.recover / 'LATEST'))}", root=True)
    return resume_hint(found.ok)


async def _ended(jobs: RayJobs, submission_id: str, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (await jobs.get(submission_id)).alive:
        if loop.time() > end:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True
