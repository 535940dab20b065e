"""A running remote script as a pair of streams, so that what one host writes can flow into another."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from clusterkit.ssh.api import ErrorKind, HostError, Stream
from clusterkit.ssh.command import Command, Ended
from clusterkit.ssh.output import Output

_MOST_WAITING = 4 * 1024 * 1024
"""Bytes of stdout that wait to be read until the host is told to stop."""


class CommandStream:
    """`clusterkit.ssh.api.Stream` of one command."""

    def __init__(self, host: str, exit_code: Callable[[Command], int]) -> None:
        self.errors = Output()
        self.command = Command(self._take)
        self._host, self._exit_code = host, exit_code
        self._waiting: deque[bytes] = deque()
        self._size, self._paused = 0, False
        self._arrived = asyncio.Event()

    async def read(self) -> bytes:
        """See `Stream.read`."""
        while not self._waiting and not self.command.over:
            self._arrived.clear()
            over = asyncio.ensure_future(self.command.wait())
            arrived = asyncio.ensure_future(self._arrived.wait())
            try:
                await asyncio.wait((over, arrived), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                arrived.cancel()
        if not self._waiting:
            return b""
        data = self._waiting.popleft()
        self._size -= len(data)
        if self._paused and self._size < _MOST_WAITING // 2 and self.command.chan is not None:
            self._paused = False
            self.command.chan.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """See `Stream.write`."""
        try:
            await self.command.write(data)
        except Ended:
            code = await self.wait()
            message = f"a command ended (exit code {code}) before its input did: {self.errors.last_lines()}"
            raise HostError(self._host, ErrorKind.WRITE, message) from None

    async def write_eof(self) -> None:
        """See `Stream.write_eof`."""
        await self.command.write_eof()

    async def wait(self) -> int:
        """See `Stream.wait`."""
        await self.command.wait()
        return self._exit_code(self.command)

    def _take(self, is_stderr: bool, data: bytes) -> None:
        if is_stderr:
            self.errors(True, data)
            return
        self._waiting.append(data)
        self._size += len(data)
        self._arrived.set()
        if self._size > _MOST_WAITING and not self._paused and self.command.chan is not None:
            self._paused = True
            self.command.chan.pause_reading()


async def relay(source: Stream, target: Stream, on_bytes: Callable[[int], None] | None = None) -> int:
    """Send all that one script prints to another's stdin, and end it. Return the number of bytes.

    Args:
        on_bytes: gets the number of bytes sent so far.
    """
    moved = 0
    while piece := await source.read():
        await target.write(piece)
        moved += len(piece)
        if on_bytes is not None:
            on_bytes(moved)
    await target.write_eof()
    return moved
