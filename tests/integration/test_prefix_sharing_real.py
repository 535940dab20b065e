"""What a group's prompts share, read by a real vLLM server on the CPU: how often, and what comes of it when it dies.

vLLM reads once what prompts begin with that come at the same moment, so nothing waits there by itself. `holds` makes
it wait as on SGLang, whose cache knows only what has been read; SGLang itself wants a GPU, and is measured by
benchmarks/rollout_settings.py.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil
import pytest

from tests.vllmserver import VOCABULARY, random_qwen2, start_vllm, vllm_python
from trainer.engines.base import EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.process import ServerProcess
from trainer.engines.served import ServedEngine
from trainer.types import Completion, SamplingParams

PREFIX, OWN, SIZE = 1664, 100, 8
"""Tokens of the prefix, whole blocks of vLLM's on a CPU (128), and of each prompt's own; prompts of a group."""
seeds = count(1)


@dataclass
class Served:
    server: Server
    process: ServerProcess
    folder: Path

    async def engine(self) -> ServedEngine:
        engine = ServedEngine(ServerPool("/health", Limits(control=300.0)), make_dialect("vllm"), self.folder, set())
        await engine.join(self.server)
        return engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    vllm_python()
    base = tmp_path_factory.mktemp("sharing")
    random_qwen2(0).save_pretrained(base / "model")
    server, process = asyncio.run(start_vllm(base / "model", base / "vllm.log", name="one"))
    yield Served(server, process, base / "model")
    asyncio.run(process.stop())


def prompts() -> list[list[int]]:
    draw = random.Random(next(seeds))
    prefix = [draw.randrange(2, VOCABULARY) for _ in range(PREFIX)]
    return [prefix + [draw.randrange(2, VOCABULARY) for _ in range(OWN)] for _ in range(SIZE)]


async def ask(engine: ServedEngine, asked: list[list[int]], key: str) -> list[Completion]:
    jobs = (engine.generate(ids, SamplingParams(8, 1.0, n, (1,)), key=key) for n, ids in enumerate(asked))
    return list(await asyncio.gather(*jobs))


def computed(engine: ServedEngine) -> int:
    return engine.stats.prompt_tokens - engine.stats.served_tokens


@pytest.mark.parametrize("holds", [False, True])
def test_a_group_reads_its_prefix_once(served: Served, holds: bool) -> None:
    async def run() -> None:
        engine = await served.engine()
        assert not engine.sharing.holds  # vLLM's own way
        engine.sharing.holds = holds
        asked = prompts()
        first = await ask(engine, asked, "g")
        assert engine.stats.ahead_requests == engine.sharing.waits / SIZE == float(holds)
        assert computed(engine) == PREFIX + SIZE * OWN
        # Sampling is a function of the seeds, whoever read what before whom.
        assert [one.token_ids for one in first] == [one.token_ids for one in await ask(engine, asked, "again")]
        await engine.pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("holds", [False, True])
def test_the_next_section_is_read_while_the_present_turn_is_answered(served: Served, holds: bool) -> None:
    async def run() -> None:
        engine = await served.engine()
        engine.sharing.holds, engine.sharing.ahead = holds, True
        now, later = prompts(), prompts()
        engine.prefetch(later[0][:PREFIX], key="g")
        jobs = [
            asyncio.create_task(engine.generate(ids, SamplingParams(200, 1.0, n, (1,)), key="g"))
            for n, ids in enumerate(now)
        ]
        while engine.stats.ahead_requests < 1 + holds:
            await asyncio.sleep(0.01)
        assert not all(job.done() for job in jobs)  # a response may end early by itself
        await asyncio.gather(*jobs)
        before = computed(engine)
        await ask(engine, later, "g")
        assert computed(engine) - before == SIZE * OWN
        assert engine.stats.ahead_requests == 1 + holds
        await engine.pool.close()

    asyncio.run(run())


def test_a_server_that_is_killed_over_a_prefix_ends_what_waits_for_it_with_the_reason(served: Served) -> None:
    async def run() -> None:
        engine = await served.engine()
        engine.sharing.holds = True
        guard = psutil.Process(served.process.pid)
        (server,) = guard.children()
        server.suspend()  # so that the prefix is not read before it is killed
        jobs = asyncio.ensure_future(ask(engine, prompts(), "g"))
        while not served.server.in_flight:
            await asyncio.sleep(0.01)
        assert served.server.in_flight == 1
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"no inference server is left \(one: "):
            await asyncio.wait_for(jobs, 60)
        await engine.pool.close()

    asyncio.run(run())
