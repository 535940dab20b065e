"""Connections to bastions, shared by all hosts behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import asyncssh


@dataclass
class Link:
    """A connection, and the bastion that it goes through."""

    connection: asyncssh.SSHClientConnection
    via: Bastion | None = None

    async def close(self) -> None:
        """Close the connection, and the bastion's where no other host uses it."""
        self.connection.close()
        await self.connection.wait_closed()
        if self.via is not None:
            via, self.via = self.via, None
            await via.release()


@dataclass
class Bastion:
    """One shared connection."""

    link: Link
    opening: asyncio.Semaphore  # limits how many sockets are opened through it at once
    release: Callable[[], Awaitable[None]]


@dataclass
class _Entry:
    bastion: asyncio.Future[Bastion] = field(init=False)
    users: int = 0

    @property
    def is_dead(self) -> bool:
        future = self.bastion
        return future.done() and (
            future.cancelled() or future.exception() is not None or future.result().link.connection.is_closed()
        )


class Bastions:
    """Opens each bastion once and closes it after its last user."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, ...], _Entry] = {}

    async def acquire(self, jump: tuple[str, ...], limit: int, open_link: Callable[[], Awaitable[Link]]) -> Bastion:
        """Return the bastion at the end of a chain. The caller must release it.

        Raises:
            HostError: as `open_link`, in all that wait for the same bastion.
        """
        entry = self._entries.get(jump)
        if entry is None or entry.is_dead:
            entry = self._entries[jump] = _Entry()
            entry.bastion = asyncio.ensure_future(self._open(jump, entry, limit, open_link))
        entry.users += 1
        try:
            # Shielded: one host that gives up must not close the bastion for the others.
            return await asyncio.shield(entry.bastion)
        except BaseException:
            await self._release(jump, entry)
            raise

    async def _open(
        self, jump: tuple[str, ...], entry: _Entry, limit: int, open_link: Callable[[], Awaitable[Link]]
    ) -> Bastion:
        link = await open_link()
        return Bastion(link, asyncio.Semaphore(limit), lambda: self._release(jump, entry))

    async def _release(self, jump: tuple[str, ...], entry: _Entry) -> None:
        entry.users -= 1
        if entry.users:
            return
        if self._entries.get(jump) is entry:
            del self._entries[jump]
        if not entry.bastion.done():
            entry.bastion.cancel()
        elif not entry.bastion.cancelled() and entry.bastion.exception() is None:
            await entry.bastion.result().link.close()
