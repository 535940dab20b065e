"""The head node of a cluster that `clusterkit setup` made: a connection, its Ray's token, and the way back to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from clusterkit.backends.ray.jobs import RayJobs, jobs_of
from clusterkit.backends.ray.storage import fileroot_of
from clusterkit.hosts.model import Cluster
from clusterkit.provision.ray.token import read_token
from clusterkit.ssh.api import Session
from clusterkit.ssh.connection import connect
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.ssh.selection import Selection

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Head:
    """A connected host that shows a cluster's storage, most often its head node. token: of the cluster's Ray."""

    session: Session
    cluster: Cluster
    token: str = field(repr=False)

    @property
    def fileroot(self) -> str:
        """Where the cluster's runs lie."""
        return fileroot_of(self.cluster)

    @asynccontextmanager
    async def jobs(self) -> AsyncIterator[RayJobs]:
        """Ray's job API for the length of a block."""
        async with jobs_of(self.session, self.token) as jobs:
            yield jobs

    async def ask(self, work: Callable[[RayJobs], Awaitable[T]]) -> T:
        """What `work` finds out from Ray's job API."""
        async with self.jobs() as jobs:
            return await work(jobs)


class OnHead(Protocol):
    """Does something on a cluster's head node."""

    def __call__(self, work: Callable[[Head], Awaitable[T]], *, patient: bool = False) -> T:
        """See `RayBackend.do`."""


@asynccontextmanager
async def head_of(selection: Selection) -> AsyncIterator[Head]:
    """Connect to the head node for the length of a block.

    Raises:
        UserError: the cluster has no Ray that this machine knows a token of. HostError: the head cannot be reached.
    """
    cluster = selection.cluster
    token = read_token(cluster.name)
    if not token:
        raise UserError(
            f"this machine knows no Ray of cluster {cluster.name}: make it with clusterkit setup --cluster "
            f"{cluster.name}, or run that once more where it was set up from another machine"
        )
    session = await connect(cluster.head_host, selection.ssh)
    try:
        yield Head(session, cluster, token)
    finally:
        await session.close()


class Backoff:
    """Growing waits between attempts to reach a host again; `reset` after a success."""

    def __init__(self) -> None:
        self._wait = FIRST_WAIT

    def reset(self) -> None:
        """Begin with short waits again."""
        self._wait = FIRST_WAIT

    async def wait(self) -> None:
        """Sleep, longer each time."""
        await asyncio.sleep(self._wait)
        self._wait = min(2 * self._wait, LONGEST_WAIT)
