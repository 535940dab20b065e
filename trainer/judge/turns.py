"""Whose request is sent next: those of the oldest group of trajectories first.

The groups of the next steps are scored while this step's are waited for. In the order of their arrival, the last scores
that the trainer waits for would stand behind many that it needs a step later.
"""

from __future__ import annotations

import asyncio
import heapq
from contextvars import ContextVar
from itertools import count

ORDER: ContextVar[int] = ContextVar("order", default=0)
"""Of the group that is being sampled and scored, lower is older; 0 for everything else, which is waited for now."""


class Turns:
    """As an asyncio.Semaphore of `slots`, but among those that wait the lowest `ORDER` goes on first, then the first
    that came. Belongs to one event loop.
    """

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def __aenter__(self) -> None:
        """Wait for a slot."""
        if self._free:
            self._free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ORDER.get(), next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the slot was ours in the very moment of giving up
                self._pass_on()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Give the slot to the next."""
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
                return
        self._free += 1
