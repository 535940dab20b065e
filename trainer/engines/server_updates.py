"""What an update of the weights does on one server, and what becomes of a server where that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from trainer.engines.base import EngineError
from trainer.engines.dialect import Dialect, UntouchedError
from trainer.engines.http import Server, ServerPool

# Seconds: between two requests to cut everything off, and until a server must have let go of its requests.
ABORT_EVERY = 0.05
ABORT_DEADLINE = 60.0

Load = Callable[[Server], Awaitable[None]]
"""Brings new weights onto one paused server. UntouchedError: it kept its old ones whole; any other EngineError leaves
them in doubt, and the server is used no more."""


class ServerUpdates:
    """The parts of an update. A server that fails one is used no more, unless a docstring says otherwise."""

    def __init__(self, pool: ServerPool, dialect: Dialect) -> None:
        self.pool, self.dialect = pool, dialect

    async def drain(self, server: Server, others: asyncio.Future[None]) -> None:
        """Cut off what the server is sampling, until it runs nothing of ours. A server that cannot is used no more.

        others: done once none of other processes' requests is under way.
        """
        deadline = time.monotonic() + ABORT_DEADLINE
        while (server.in_flight or not others.done()) and not server.problem:
            try:
                # Again and again: a request may have been under way to the server at the time of the first call.
                await self.dialect.cut_off(self.pool, server)
            except EngineError as error:
                if not await self.pool.healthy(server):
                    server.discard(f"it could not be interrupted: {error}")
                    return
            if server.in_flight and time.monotonic() > deadline:
                server.discard(
                    f"{server.in_flight} requests were still running {ABORT_DEADLINE:.0f} s after being cut off"
                )
                return
            await asyncio.sleep(ABORT_EVERY)

    async def cut_off_before(self, server: Server) -> None:
        """Cut off what a server that joins is sampling, and see what it was asked before it was used no more answered.

        Paused with a request in its queue, SGLang would wait for that in vain when an adapter is to go.
        """
        before = [one for one in self.pool.servers if one.url == server.url]
        deadline = time.monotonic() + ABORT_DEADLINE
        await self.dialect.cut_off(self.pool, server)
        while any(one.in_flight for one in before) and time.monotonic() < deadline:
            await asyncio.sleep(ABORT_EVERY)
            await self.dialect.cut_off(self.pool, server)

    async def pause(self, server: Server) -> None:
        """Stop an idle server and empty its prefix cache."""
        try:
            await self.dialect.pause(self.pool, server)
        except EngineError as error:
            server.discard(f"it could not be paused: {error}")
            raise

    async def take(self, server: Server, version: int, load: Load) -> None:
        """Give a paused server new weights. Where they are in doubt after an error, it is used no more."""
        try:
            await load(server)
            await self.dialect.check_version(self.pool, server, version)
        except UntouchedError:
            raise
        except BaseException as error:  # cancelled too
            server.doubtful = True
            server.discard(f"its weights are in doubt after a failed update: {str(error) or type(error).__name__}")
            raise
        server.version = version

    async def add_adapter(self, server: Server, folder: Path, version: int) -> None:
        """Have a server load an adapter beside those in use, which stay as they are whatever becomes of it."""
        try:
            await self.dialect.adapter_routes.add(self.pool, server, folder, version)
            await self.dialect.check_version(self.pool, server, version)
        except EngineError as error:
            if not await self.pool.healthy(server):
                server.discard(str(error))
            raise UntouchedError(str(error)) from error

    async def go_on(self, server: Server) -> None:
        """Have it go on after `pause`."""
        try:
            await self.dialect.go_on(self.pool, server)
        except EngineError as error:
            server.discard(f"it did not go on after a pause: {error}")
            raise
