"""Limit how many hosts get large files from this machine at once, since they share its bandwidth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

UPLOADS = 4

UploadSlot = Callable[[str], AbstractAsyncContextManager[None]]
"""Given a host's name, returns a slot that is held while its block runs."""


def unlimited(host: str) -> AbstractAsyncContextManager[None]:  # noqa: ARG001
    """Return a slot that is always free."""
    return nullcontext()


class Uploads:
    """At most `most` uploads at once. waited: gets a host and the seconds that it waited for its slot."""

    def __init__(
        self, most: int = UPLOADS, waited: Callable[[str, float], None] = lambda _host, _seconds: None
    ) -> None:
        self._slots, self._waited = asyncio.Semaphore(most), waited

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it while the block runs."""
        began = time.monotonic()
        async with self._slots:
            self._waited(host, time.monotonic() - began)
            yield
