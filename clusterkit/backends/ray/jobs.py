"""Ray's Jobs REST API on the head node, through the SSH connection: the API listens on the head's localhost only."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx

from clusterkit.backends.base import Job
from clusterkit.provision.ray.ports import Ports
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import Session
from trainer.errors import NoAnswerError, RunError

HTTP_SECONDS = 30.0
READ_AGAIN_SECONDS = (0.5, 1.5)
"""Waits before what changes nothing is asked once more."""
TRAINS = "clusterkit-train"
"""Kind of a job that trains."""
DUPLICATE = "already exists"
DUPLICATE_SECONDS = 1.0
NO_AGENT = "No available agent"
AGENT_SECONDS, AGENT_LOOK_SECONDS = 90.0, 1.0
"""How long a job waits for the agent that starts it: a Ray that has just been started answers before its agent runs."""

_SHOWN = ("user", "submitted_from", "experiment", "trial", "run_dir")
"""Metadata that are fields of `Job`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RayJob:
    """A submitted job."""

    submission_id: str  # chosen by who submitted it
    status: str  # PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED
    message: str = ""  # Ray's words on its state
    metadata: dict[str, str] = field(default_factory=dict)  # what it was submitted with
    started: float = 0.0  # Unix seconds; 0 where it has not been
    ended: float = 0.0  # Unix seconds; 0 where it has not

    @property
    def alive(self) -> bool:
        """Whether it waits or runs."""
        return self.listed.alive

    @property
    def user(self) -> str:
        """Who has submitted it, by its own word; empty for jobs that clusterkit did not submit."""
        return self.metadata.get("user", "")

    @property
    def run(self) -> str:
        """See `Job.run`."""
        return self.listed.run

    def is_in(self, fileroot: str) -> bool:
        """Whether it trains a run of that folder of runs."""
        return self.metadata.get("run_dir", "").startswith(f"{fileroot}/logs/")

    @property
    def listed(self) -> Job:
        """As `clusterkit jobs` shows it."""
        submitted = {key: self.metadata.get(key) for key in _SHOWN}
        return Job(self.submission_id, self.status, self.message, self.started or None, self.ended or None, **submitted)


def origin() -> dict[str, str]:
    """What a job's metadata say of where it was submitted from: users of one name can be told apart by it."""
    return {"submitted_from": f"{user_name()}@{platform.node()}"}


def matching_jobs(
    jobs: list[RayJob], user: str, experiment: str | None, trial: str | None, fileroot: str | None = None
) -> list[RayJob]:
    """Living runs of that user with that name, or all of theirs; of one folder of runs, or of all."""
    return [
        job
        for job in jobs
        if job.alive
        and job.metadata.get("kind") == TRAINS
        and job.user == user
        and experiment in (None, job.metadata.get("experiment"))
        and trial in (None, job.metadata.get("trial"))
        and (fileroot is None or job.is_in(fileroot))
    ]


def of_others(jobs: list[RayJob], user: str) -> list[RayJob]:
    """Living jobs that are not that user's, whatever they do."""
    return [job for job in jobs if job.alive and job.user != user]


def next_id(prefix: str, known: list[RayJob]) -> str:
    """A submission ID that none of the known jobs has: the prefix and the next number."""
    numbers = [job.submission_id.removeprefix(prefix) for job in known if job.submission_id.startswith(prefix)]
    return f"{prefix}{max((int(number) for number in numbers if number.isdigit()), default=0) + 1}"


class DuplicateJobError(RunError):
    """Somebody has submitted a job of that ID at the same time."""


class NoAgentError(RunError):
    """No node has an agent that could start a job (yet); nothing was started."""


async def submit_or_attach(attempt: Callable[[], Awaitable[T]], refused: str) -> T:
    """Submit a job, again when somebody else was faster.

    Args:
        attempt: attaches to a job or submits one.
        refused: message for the case that somebody else always is.

    Raises:
        RunError: with `refused`, after three tries.
    """
    for _ in range(3):
        try:
            return await attempt()
        except DuplicateJobError:
            await asyncio.sleep(DUPLICATE_SECONDS)  # somebody has submitted it at this very moment: attach to theirs
    raise RunError(refused)


@asynccontextmanager
async def jobs_of(head: Session, token: str) -> AsyncIterator[RayJobs]:
    """Open the API for the length of a block. Raises HostError where the connection is lost."""
    port = await head.forward("127.0.0.1", Ports().dashboard)
    # Not through a proxy that our environment may name.
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=HTTP_SECONDS,
        trust_env=False,
    ) as client:
        yield RayJobs(client, head.host.name)


class RayJobs:
    """Submit, look at and stop jobs. Every method raises RunError where Ray does not answer or refuses."""

    def __init__(self, client: httpx.AsyncClient, head: str) -> None:
        self._client, self._head = client, head

    async def all(self) -> list[RayJob]:
        """Every job that was submitted to this Ray since it was started, the oldest first."""
        found = [_job(entry) for entry in await self._ask("GET", "/api/jobs/") if entry.get("submission_id")]
        return sorted(found, key=lambda job: job.started)

    async def get(self, submission_id: str) -> RayJob:
        """One job."""
        return _job(await self._ask("GET", _path(submission_id)))

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        *,
        environment: dict[str, str],
        metadata: dict[str, str],
        gpus: int = 0,
    ) -> None:
        """Start a job: on the head node, or where so many GPUs of one host are free.

        Args:
            submission_id: chosen by us, so that the same submission cannot start twice.
            environment: variables; never secrets, since everybody who may ask Ray sees them.
            metadata: what to find it by.
            gpus: that Ray keeps for its entry point; it waits until they are free.

        Raises:
            DuplicateJobError: there is a job of that ID.
        """
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": {"env_vars": environment},
            "metadata": metadata,
            **({"entrypoint_num_gpus": gpus} if gpus else {}),
        }
        end = time.monotonic() + AGENT_SECONDS
        while True:
            try:
                await self._ask("POST", "/api/jobs/", body)
            except NoAgentError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(AGENT_LOOK_SECONDS)
            else:
                return

    async def stop(self, submission_id: str) -> bool:
        """Ask Ray to end the job; whether it was alive."""
        return bool((await self._ask("POST", f"{_path(submission_id)}/stop"))["stopped"])

    async def logs(self, submission_id: str) -> str:
        """All that the job's entry point has printed."""
        return str((await self._ask("GET", f"{_path(submission_id)}/logs"))["logs"])

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Ask once; a question that changes nothing some times more, as a busy head drops connections."""
        for wait in READ_AGAIN_SECONDS if method == "GET" else ():
            with contextlib.suppress(httpx.TransportError):
                return await self._client.request(method, path, json=body)
            await asyncio.sleep(wait)
        return await self._client.request(method, path, json=body)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = await self._request(method, path, body)
        except httpx.HTTPError as error:
            raise NoAnswerError(
                f"{self._head}: Ray's job API does not answer ({type(error).__name__}: {error}): "
                "clusterkit ray-status shows how the cluster is"
            ) from error
        if answer.is_error:
            reason = _last_line(answer.text)
            if DUPLICATE in answer.text:
                raise DuplicateJobError(f"{self._head}: {reason}")
            fix = (
                "its token is another one than ours: run clusterkit setup again"
                if answer.status_code in (401, 403)
                else "clusterkit ray-status shows how the cluster is"
            )
            kind = NoAgentError if NO_AGENT in answer.text else RunError
            raise kind(f"{self._head}: Ray's job API refused {method} {path} ({answer.status_code}): {reason}; {fix}")
        return answer.json()


def _job(entry: dict[str, Any]) -> RayJob:
    return RayJob(
        submission_id=str(entry["submission_id"]),
        status=str(entry["status"]),
        message=str(entry.get("message") or ""),
        metadata={str(key): str(value) for key, value in (entry.get("metadata") or {}).items()},
        started=(entry.get("start_time") or 0) / 1000,
        ended=(entry.get("end_time") or 0) / 1000,
    )


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
