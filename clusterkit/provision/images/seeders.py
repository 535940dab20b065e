"""Hosts that have the image and send it on, each to one host at a time, so that their number doubles every round."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from clusterkit.ssh.api import HostError, Session


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
