"""Whose request is sent next: those of the oldest group of trajectories first.

The groups of the next steps are scored while this step's are waited for. In the order of their arrival, the last scores
that the trainer waits for would stand behind many that it needs a step later.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from contextvars import ContextVar
from itertools import count

ORDER: ContextVar[int] = ContextVar("order", default=0)
"""Of the group that is being sampled and scored, lower is older; 0 for everything else, which is waited for now."""


class Turns:
    """As an asyncio.Semaphore of `slots`, but among those that wait the lowest `ORDER` goes on first, then the first
    that came; and fewer slots are given where servers turn out too slow for so many (additive increase, multiplicative
    decrease: Chiu and Jain 1989). Belongs to one event loop.
    """

    def __init__(self, slots: int) -> None:
        self._most, self._allowed = slots, float(slots)
        self._taken = 0
        self._narrowed = -math.inf
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @property
    def allowed(self) -> int:
        """Slots that are given at present."""
        return int(self._allowed)

    async def __aenter__(self) -> None:
        """Wait for a slot."""
        if self._taken < self.allowed:
            self._taken += 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ORDER.get(), next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the slot was ours in the very moment of giving up
                self._give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Give the slot to the next."""
        self._give_back()

    def narrow(self, began: float, now: float) -> bool:
        """Half as many slots from `now` on, for a request that was too much and was sent when it `began` (both as
        time.monotonic). Requests that were sent before it was last done say nothing about the slots since: False.
        """
        if began <= self._narrowed or self.allowed == 1:
            return False
        self._narrowed, self._allowed = now, float(max(self.allowed // 2, 1))
        return True

    def widen(self) -> None:
        """An answer came: one slot more for as many of them as there are slots."""
        self._allowed = min(self._allowed + 1 / self._allowed, self._most)
        self._wake()

    def _give_back(self) -> None:
        self._taken -= 1
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._taken < self.allowed:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                self._taken += 1
                future.set_result(None)
