"""Send an image from one host to another through this machine, over our two connections: no host gets a key."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clusterkit.provision import docker
from clusterkit.provision.images.identity import Image, ImageError
from clusterkit.provision.images.meter import Progress
from clusterkit.ssh.api import ErrorKind, HostError, Session
from clusterkit.ssh.shell import pipe
from clusterkit.ssh.stream import relay as copy

_ROOM = "make room where Docker keeps its images (docker system df), then run setup again"


async def relay(
    source: Session, target: Session, image: Image, *, progress: Progress | None = None, timeout: float
) -> None:
    """Send an image from a host that has it to one that does not.

    Raises:
        ImageError: the transfer failed; `host` is where.
    """
    host = target.host.name

    def moved(done: int) -> None:
        if progress is not None:
            progress(host, done, 0)

    async with (
        source.stream(save_script(image), root=True, timeout=timeout) as reading,
        target.stream(LOAD, root=True, timeout=timeout) as writing,
    ):
        try:
            await copy(reading, writing, moved)
        except HostError as error:
            if error.kind is not ErrorKind.WRITE:
                raise
            raise ImageError(host, f"the image cannot be loaded: {error.message}", _ROOM) from None
        for session, stream in ((source, reading), (target, writing)):
            if await stream.wait():
                reason = stream.errors.last_lines()
                raise ImageError(session.host.name, f"the image could not be handed to {host}: {reason}", _ROOM)
    if progress is not None:
        progress(host, image.size, image.size)


def save_script(image: Image) -> str:
    """Return a script that prints the image, compressed."""
    return pipe(("docker save", docker.command("save", image.run_as)), ("compressing", "gzip -1"))


LOAD = pipe(("decompressing", "gzip -dc"), ("docker load", "docker load -q"))
"""Script that loads the output of `save_script`."""


class NoSeederError(Exception):
    """No host is left that could send the image."""


class Seeders:
    """Hosts that have the image."""

    def __init__(self) -> None:
        self._free: deque[Session] = deque()
        self._busy = 0
        self._changed = asyncio.Condition()

    async def add(self, session: Session) -> None:
        """Add a host that has it."""
        async with self._changed:
            self._free.append(session)
            self._changed.notify()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Session]:
        """Wait for a host that is not sending, and hold it for the block. A lost host is not used again.

        Raises:
            NoSeederError: all hosts were lost.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._free or not self._busy)
            if not self._free:
                raise NoSeederError
            session = self._free.popleft()
            self._busy += 1
        lost = False
        try:
            yield session
        except HostError as error:
            lost = error.host == session.host.name
            raise
        finally:
            self._busy -= 1
            if not lost:
                self._free.append(session)
            await asyncio.shield(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
