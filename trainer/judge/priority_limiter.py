"""Order of requests: those of the oldest group of trajectories go first.

Groups of later steps are scored while the trainer waits for this step's. In order of arrival, the last scores of this
step would wait behind many that are needed a step later.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from contextvars import ContextVar
from itertools import count

ORDER: ContextVar[int] = ContextVar("order", default=0)
"""Order of the group that is being sampled and scored, lower is older; 0 for everything else, which is needed now."""


class PriorityLimiter:
    """A semaphore of `slots` whose waiters go on by `ORDER`, then in order of arrival.

    Fewer slots are given while servers are too slow for so many: additive increase, multiplicative decrease (Chiu and
    Jain 1989). Belongs to one event loop.
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
        if self._taken < self.allowed:
            self._taken += 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (ORDER.get(), next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it got a slot at the moment of its cancellation
                self._give_back()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._give_back()

    def narrow(self, began: float, now: float) -> bool:
        """Halve the slots after a request that was too slow.

        Args:
            began: when the request was sent, as time.monotonic(). Requests from before the last halving do not count.

        Returns:
            Whether the slots were halved.
        """
        if began <= self._narrowed or self.allowed == 1:
            return False
        self._narrowed, self._allowed = now, float(max(self.allowed // 2, 1))
        return True

    def widen(self) -> None:
        """Count an answer: as many answers as there are slots give one slot more."""
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
