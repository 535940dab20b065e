"""The slots of requests to a judge: fewer while it is too slow, more as it answers."""

from __future__ import annotations

import asyncio

from trainer.judge.priority_limiter import PriorityLimiter


def test_slots_are_halved_once_for_requests_of_one_time_and_come_back_with_answers() -> None:
    async def slots() -> None:
        turns = PriorityLimiter(8)
        assert turns.narrow(began=1.0, now=2.0)
        assert not turns.narrow(began=2.0, now=2.5), "it was sent while there were 8"
        assert turns.allowed == 4
        held = [asyncio.ensure_future(turns.__aenter__()) for _ in range(6)]
        await asyncio.sleep(0)
        assert sum(one.done() for one in held) == 4
        for _ in range(5):
            turns.widen()
        await asyncio.sleep(0)
        assert sum(one.done() for one in held) == turns.allowed == 5
        for _ in range(100):
            turns.widen()
        assert turns.allowed == 8
        assert turns.narrow(began=3.0, now=4.0)
        await turns.__aexit__()
        await asyncio.sleep(0)
        assert sum(one.done() for one in held) == 6, "six of four slots are taken: the next waits"

    asyncio.run(slots())
