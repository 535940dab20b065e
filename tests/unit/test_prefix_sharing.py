"""Prompts of a group that begin alike are read once, and nothing is lost or held up where that goes wrong.

The server is a stand-in with SGLang's routes and its kind of cache, which serves what was read before and nothing that
is being read: SGLang itself wants a GPU (benchmarks/rollout_settings.py measures it). vLLM, whose cache is of another
kind, is asked in tests/integration/test_prefix_sharing_real.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import random_prompts
from httpstub import Answer, Drop, Hang, HttpStub
from servedrig import run_scenario

from trainer.engines import sharing
from trainer.engines.base import EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.engines.served_stats import EVALUATES, ServedStats
from trainer.rollout.batch import distinct_tokens
from trainer.types import Completion, SamplingParams, packed_ids

FAST = Limits(connect=1.0, request=20.0, control=20.0, health=0.5, attempts=2, backoff=0.01)


class RadixServer:
    """Reads a prompt in one turn of `gate`, then samples. computed: tokens of prompts that were in no cache.

    fault: how the next request for a single token, so the next prefix, is answered.
    """

    def __init__(self) -> None:
        self.version = "0"
        self.read: list[list[int]] = []
        self.computed = 0
        self.prompts: list[list[int]] = []
        self.prefixes: list[list[int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.answering = asyncio.Event()
        self.answering.set()
        self.aborted = asyncio.Event()
        self.fault: Answer | None = None
        self.caches = True  # False: it keeps no cache, as with --disable-radix-cache

    async def __call__(self, _method: str, path: str, body: dict[str, Any]) -> Answer:
        route = path.partition("?")[0]
        if route == "/server_info":
            return 200, {"version": "0.5.17"}
        if route == "/model_info":
            return 200, {"weight_version": self.version}
        if route == "/abort_request":
            self.aborted.set()
        if route == "/flush_cache":
            self.read.clear()
        return await self.generate(body) if route == "/generate" else (200, {})

    async def generate(self, body: dict[str, Any]) -> Answer:
        ids, wanted = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        probing = body["extra_key"] == "probe"
        (self.prefixes if wanted == 1 else self.prompts).append(ids)
        if wanted == 1 and not probing and self.fault is not None:
            fault, self.fault = self.fault, None
            return fault
        cached = max((common(ids, known) for known in self.read), default=0)
        cached = min(cached, len(ids) - 1) * self.caches
        finish = "length"
        for event in () if probing else (self.gate, self.answering)[: 1 if wanted == 1 else 2]:
            waits = [asyncio.create_task(one.wait()) for one in (event, self.aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.aborted.is_set() and not event.is_set():
                return 200, meta([], "abort", self.version, len(ids), 0)
            if event is self.gate:
                self.computed += len(ids) - cached
                self.read.append(ids)
        return 200, meta([100 + n for n in range(wanted)], finish, self.version, len(ids), cached)


def meta(ids: list[int], finish: str, version: str, prompt: int, cached: int) -> dict[str, Any]:
    pairs = [[-0.5, token, None] for token in ids]
    counts = {"prompt_tokens": prompt, "cached_tokens": cached, "weight_version": version}
    return {"meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": finish}, **counts}}


def common(one: list[int], other: list[int]) -> int:
    return sharing.common_prefix(np.array(one), np.array(other))


class Rig:
    def __init__(self, model: Path) -> None:
        self.pool = ServerPool("/health", FAST)
        self.engine = ServedEngine(self.pool, make_dialect("sglang"), model, set())
        self.radix: list[RadixServer] = []
        self.stubs: list[HttpStub] = []

    async def add(self) -> RadixServer:
        radix = RadixServer()
        self.radix.append(radix)
        self.stubs.append(await HttpStub(radix).__aenter__())
        await self.engine.join(Server(f"s{len(self.stubs) - 1}", self.stubs[-1].url))
        radix.prefixes.clear()
        return radix

    def ask(self, prompt: list[int], seed: int = 0, key: str = "g") -> asyncio.Task[Completion]:
        return asyncio.create_task(self.engine.generate(prompt, SamplingParams(4, seed=seed), key=key))


Scenario = Callable[[Callable[[Rig], Awaitable[None]]], None]


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return partial(run_scenario, lambda: Rig(tmp_path))


def ids(length: int, seed: int) -> list[int]:
    return random_prompts(1, length, length, 5000, seed=seed)[0]


def group(shared: int, own: int, count: int, seed: int = 0) -> list[list[int]]:
    prefix = ids(shared, seed)
    return [prefix + ids(own, 1000 + 100 * seed + n) for n in range(count)]


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.005)


def test_a_steps_share_of_cached_prompts_is_without_those_of_an_evaluation(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()

        async def evaluate() -> None:
            EVALUATES.set(True)
            await asyncio.gather(*(rig.ask(prompt, n) for n, prompt in enumerate(group(300, 100, 4, seed=1))))

        before = replace(rig.engine.stats)
        await asyncio.create_task(evaluate())
        assert rig.engine.stats.prompt_tokens == 1600
        assert rig.engine.stats.cached_share_since(before) is None
        await asyncio.gather(*(rig.ask(prompt, n) for n, prompt in enumerate(group(400, 100, 8))))
        assert rig.engine.stats.cached_share_since(before) == 1 - (400 + 8 * 100) / 4000

    scenario(body)


def test_an_evaluation_on_a_server_that_keeps_no_cache_gives_a_step_no_share_of_one(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        (await rig.add()).caches = False

        async def evaluate() -> None:
            EVALUATES.set(True)
            await asyncio.gather(*(rig.ask(prompt, n) for n, prompt in enumerate(group(2000, 100, 4, seed=1))))

        await asyncio.create_task(evaluate())
        assert rig.engine.stats.ahead_tokens == rig.engine.stats.evaluated_ahead_tokens == 2000
        await asyncio.gather(*(rig.ask(prompt, n) for n, prompt in enumerate(group(0, 500, 8))))
        assert rig.engine.stats.cached_share_since(ServedStats()) == 0

    scenario(body)


def test_a_prefix_is_read_ahead_for_whoever_announced_it(scenario: Scenario) -> None:
    """Although the request of an evaluation comes between, after which it is looked at."""

    async def body(rig: Rig) -> None:
        radix = await rig.add()
        rig.engine.sharing.ahead = True
        radix.answering.clear()
        under_way = rig.ask(ids(300, 5), key="step")
        await until(lambda: len(radix.prompts) == 1)

        async def evaluate() -> None:
            EVALUATES.set(True)
            await rig.ask(ids(200, 6), key="evaluation")

        rig.engine.prefetch(ids(400, 7), key="step")
        evaluation = asyncio.create_task(evaluate())
        await until(lambda: radix.prefixes == [ids(400, 7)])
        radix.answering.set()
        await asyncio.gather(under_way, evaluation)
        await until(lambda: rig.engine.stats.ahead_tokens == 400)
        assert rig.engine.stats.evaluated_ahead_tokens == 0

    scenario(body)


def test_prompts_that_come_together_read_what_they_share_once(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        prompts = group(400, 50, 8)
        radix.gate.clear()
        jobs = [rig.ask(prompt, n) for n, prompt in enumerate(prompts)]
        await until(lambda: len(radix.prefixes) == 1)
        assert not radix.prompts
        radix.gate.set()
        await asyncio.gather(*jobs)
        assert radix.prefixes == [prompts[0][:400]]
        assert sorted(radix.prompts) == sorted(prompts)
        assert radix.computed == 400 + 8 * 50 == distinct_tokens([packed_ids(prompt, ()) for prompt in prompts])
        stats = rig.engine.stats
        assert (stats.ahead_requests, stats.ahead_tokens, stats.requests) == (1, 400, 8)
        assert stats.prompt_tokens - stats.served_tokens == radix.computed

    scenario(body)


def test_without_sharing_they_all_read_it(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        rig.engine.sharing.enabled = False
        radix.gate.clear()
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 8)]
        await until(lambda: len(radix.prompts) == 8)
        radix.gate.set()
        await asyncio.gather(*jobs)
        assert radix.computed == 8 * 450
        assert not radix.prefixes

    scenario(body)


def test_equal_prompts_are_read_once_and_groups_do_not_wait_for_each_other(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.gate.clear()
        prompts = {key: ids(300, number) for number, key in enumerate("ab")}
        jobs = [rig.ask(prompt, n, key) for key, prompt in prompts.items() for n in range(4)]
        await until(lambda: len(radix.prefixes) == 2)
        radix.gate.set()
        await asyncio.gather(*jobs)
        assert sorted(radix.prefixes) == sorted(prompts.values())
        assert radix.computed == 2 * 300 + 8  # the last token gives the first logits

    scenario(body)


@pytest.mark.parametrize(
    ("prompts", "key"),
    [
        (group(400, 50, 1), "g"),  # nobody else
        (group(60, 400, 8), "g"),  # too little
        (group(100, 1000, 8), "g"),  # too small a part
        (group(400, 50, 8), ""),  # of no group
        ([ids(400, n) for n in range(8)], "g"),  # nothing
    ],
)
def test_what_shares_little_is_sent_at_once(scenario: Scenario, prompts: list[list[int]], key: str) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        await asyncio.gather(*(rig.ask(prompt, key=key) for prompt in prompts))
        assert not radix.prefixes
        assert len(radix.prompts) == len(prompts)
        assert rig.engine.sharing.waits == 0

    scenario(body)


def test_prompts_that_come_one_after_the_other_are_found_to_share(scenario: Scenario) -> None:
    """As of a group whose trajectories end their turns at different times, of an agent that announces nothing."""

    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.answering.clear()
        jobs: list[asyncio.Task[Completion]] = []
        # The first is sent as it is: who could know. The second is seen to begin like it.
        for n, prompt in enumerate(group(400, 50, 4)):
            jobs.append(rig.ask(prompt))
            await until(lambda n=n: len(radix.prompts) == n + 1)  # type: ignore[misc]
        assert len(radix.prefixes) == 1
        await until(lambda: radix.computed == 450 + 1 + 3 * 50)  # and a last token, of the prefix that is there
        # Another turn beside it: now the first is expected not to stay the only one.
        for n, prompt in enumerate(group(400, 50, 4, seed=1)):
            jobs.append(rig.ask(prompt))
            await until(lambda n=n: len(radix.prompts) == 5 + n)  # type: ignore[misc]
        assert len(radix.prefixes) == 2
        # A turn in which nothing is shared: the first is read alone in vain, and no other.
        for n in range(4):
            jobs.append(rig.ask(ids(450, 50 + n)))
            await until(lambda n=n: len(radix.prompts) == 9 + n)  # type: ignore[misc]
        assert len(radix.prefixes) == 3
        radix.answering.set()
        await asyncio.gather(*jobs)

    scenario(body)


def test_an_announced_prefix_is_read_by_the_first_that_wants_it(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.answering.clear()
        prompts = group(400, 300, 4)
        held = rig.ask(ids(10, 9))  # of another turn
        await until(lambda: len(radix.prompts) == 1)
        for _ in prompts:  # every trajectory says it
            rig.engine.prefetch(prompts[0][:400], key="g")
        assert not radix.prefixes
        jobs = []
        for n, prompt in enumerate(prompts):
            jobs.append(rig.ask(prompt))
            await until(lambda n=n: len(radix.prompts) == n + 2)  # type: ignore[misc]
        assert radix.prefixes == [prompts[0][:400]]
        await until(lambda: radix.computed == 10 + 400 + 4 * 300)
        radix.answering.set()
        await asyncio.gather(held, *jobs)

    scenario(body)


def test_sections_are_read_while_the_turn_before_is_answered(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        rig.engine.sharing.ahead = True
        radix.answering.clear()
        first, second = group(400, 50, 4), group(400, 50, 4, seed=1)
        rig.engine.prefetch(second[0][:400], key="g")
        jobs = [rig.ask(prompt) for prompt in first]
        await until(lambda: len(radix.prefixes) == 2)
        assert radix.prefixes == [first[0][:400], second[0][:400]]
        radix.answering.set()
        await asyncio.gather(*jobs)
        await asyncio.gather(*(rig.ask(prompt) for prompt in second))
        assert len(radix.prefixes) == 2
        assert radix.computed == 2 * (400 + 4 * 50)

    scenario(body)


def test_nothing_is_read_ahead_for_a_group_that_is_given_up_or_on_a_full_server(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        rig.engine.sharing.ahead = True
        radix.answering.clear()
        monkeypatch.setattr("trainer.engines.served.ROOM", 1)
        rig.engine.prefetch(ids(400, 7), key="g")
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 4)]
        await until(lambda: len(radix.prompts) == 4)
        await asyncio.sleep(3 * sharing.SETTLE_S)  # nothing may come: there is no condition to wait for
        assert len(radix.prefixes) == 1
        radix.gate.clear()
        monkeypatch.setattr("trainer.engines.served.ROOM", 100)
        jobs.append(rig.ask(ids(100, 5), key="other"))
        await until(lambda: len(radix.prefixes) == 2)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        server = rig.pool.servers[0]
        await until(lambda: not server.in_flight)  # what was read ahead was cancelled, too

    scenario(body)


@pytest.mark.parametrize("fault", [Drop(), (500, {}), (400, {"error": "no"}), (200, {"strange": 1})])
def test_prompts_go_on_when_reading_the_prefix_fails(scenario: Scenario, fault: Answer) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.fault = fault
        found = await asyncio.gather(*(rig.ask(prompt) for prompt in group(400, 50, 8)))
        assert [one.token_ids for one in found] == [[100, 101, 102, 103]] * 8

    scenario(body)


def test_a_prefix_that_is_not_answered_is_waited_for_a_bounded_time(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        monkeypatch.setattr(sharing, "MOST_WAIT_S", 0.3)
        radix.fault = Hang()
        found = await asyncio.gather(*(rig.ask(prompt) for prompt in group(400, 50, 8)))
        assert len(found) == len(radix.prompts) == 8

    scenario(body)


def test_a_server_that_dies_over_a_prefix_hands_it_to_another(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        first, second = await rig.add(), await rig.add()
        first.gate.clear()
        second.gate.clear()
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 8)]
        await until(lambda: bool(first.prefixes or second.prefixes))
        dead, left = (0, second) if first.prefixes else (1, first)
        rig.stubs[dead].die()
        await until(lambda: bool(left.prefixes))
        left.gate.set()
        assert len(await asyncio.gather(*jobs)) == 8
        assert left.computed == 400 + 8 * 50

    scenario(body)


def test_where_no_server_is_left_the_reason_comes_at_once(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.gate.clear()
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 8)]
        await until(lambda: bool(radix.prefixes))
        rig.stubs[0].die()
        errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert all("no inference server is left" in str(error) for error in errors)
        assert all(isinstance(error, EngineError) for error in errors)

    scenario(body)


@pytest.mark.parametrize("when", ["reading", "answering"])
def test_new_weights_are_read_with_once_again(scenario: Scenario, when: str) -> None:
    """Cut off while the prefix is read, or while the prompts are answered: either way it is read once afterwards."""

    async def body(rig: Rig) -> None:
        radix = await rig.add()
        gate = radix.gate if when == "reading" else radix.answering
        gate.clear()
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 8)]
        done = 400 + 8 * 50 if when == "answering" else 0
        await until(lambda: len(radix.prefixes) == 1 and radix.computed == done)
        radix.computed = 0

        async def load(_server: Server) -> None:
            radix.version = "1"
            radix.aborted.clear()
            gate.set()

        await rig.engine.update(1, load)
        found = await asyncio.gather(*jobs)
        assert {one.version for one in found} == {1}
        assert [len(prefix) for prefix in radix.prefixes] == [400, 400]
        assert radix.computed == 400 + 8 * 50

    scenario(body)


def test_one_that_is_cancelled_takes_nothing_from_the_others(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        radix = await rig.add()
        radix.gate.clear()
        jobs = [rig.ask(prompt) for prompt in group(400, 50, 4)]
        await until(lambda: bool(radix.prefixes))
        jobs[0].cancel()
        radix.gate.set()
        assert len(await asyncio.gather(*jobs[1:])) == 3
        assert radix.computed == 400 + 3 * 50

    scenario(body)


def test_an_engine_is_used_from_another_event_loop_after_one_that_broke_off(tmp_path: Path) -> None:
    engine = ServedEngine(ServerPool("/health", FAST), make_dialect("sglang"), tmp_path, set())
    prompts = group(400, 50, 4)

    async def serve(body: Callable[[RadixServer], Awaitable[None]]) -> None:
        radix = RadixServer()
        async with HttpStub(radix) as stub:
            engine.pool.servers = []
            await engine.join(Server("s", stub.url))
            radix.prefixes.clear()
            await body(radix)
        await engine.pool.close()

    async def broken_off(radix: RadixServer) -> None:
        radix.gate.clear()
        jobs = [asyncio.create_task(engine.generate(p, SamplingParams(4), key="g")) for p in prompts]
        await until(lambda: bool(radix.prefixes))
        for job in jobs:
            job.cancel()

    async def whole(radix: RadixServer) -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*(engine.generate(p, SamplingParams(4), key="g") for p in prompts))
        assert radix.computed == 400 + 4 * 50

    asyncio.run(serve(broken_off))
    asyncio.run(serve(whole))


def test_beginnings_are_those_of_groups_and_leave_a_token() -> None:
    groups = [group(100, 20, 4), group(80, 60, 2, seed=1), [ids(50, 77)]]
    prompts = [prompt for one in groups for prompt in one]
    order = np.random.default_rng(0).permutation(len(prompts)).tolist()
    found = sharing.common_beginnings([prompts[i] for i in order])
    assert [found[order.index(i)] for i in range(len(prompts))] == [100] * 4 + [80] * 2 + [0]
    assert sharing.common_beginnings([[1] * 10, [1] * 12]) == [9, 9]
