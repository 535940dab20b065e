"""The engine over a real vLLM server on the CPU: exact ids and log-probs, weight updates, caches, failures.

One server serves the whole file; the tests run in this order, and the last one kills it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from tokenversions import token_versions

from tests.vllmserver import VOCABULARY, random_qwen2, start_vllm, vllm_options, vllm_python
from trainer.engines.base import EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import RefusedError, Server, ServerFailedError, ServerLostError, ServerPool
from trainer.engines.launching import launch
from trainer.engines.process import ServerProcess, ServerStartError
from trainer.engines.served import ServedEngine
from trainer.engines.vllm_dialect import NO_METHOD
from trainer.types import Completion, SamplingParams

EXACT = 1e-3
"""Largest |difference| of log-probs: float32 on both sides, sums in another order."""


@dataclass
class Served:
    server: Server
    process: ServerProcess
    pool: ServerPool
    models: list[Any]
    folders: list[Path]

    def engine(self, stop_ids: set[int] | None = None, version: int | None = None) -> ServedEngine:
        engine = ServedEngine(
            self.pool, make_dialect("vllm"), self.folders[0], stop_ids or set(), version or self.server.version
        )
        if self.server not in self.pool.servers:
            asyncio.run(engine.join(self.server))
        return engine

    def score(self, version: int, prompt: list[int], done: Completion, params: SamplingParams) -> torch.Tensor:
        """transformers' log-probs of the response under one version's weights and the sampling distribution."""
        with torch.inference_mode():
            logits = self.models[version](torch.tensor([prompt + done.token_ids])).logits[0, len(prompt) - 1 : -1]
            logits[:, list(params.banned_token_ids)] = -torch.inf
        return torch.log_softmax(logits / params.temperature, -1)[range(len(done.token_ids)), done.token_ids]

    def distance(self, version: int, prompt: list[int], done: Completion, params: SamplingParams) -> torch.Tensor:
        return (self.score(version, prompt, done, params) - torch.tensor(done.logprobs)).abs()


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, VOCABULARY) for _ in range(length)]


async def ask(engine: ServedEngine, asked: list[tuple[list[int], SamplingParams]], key: str = "") -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(prompt, params, key=key) for prompt, params in asked)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    vllm_python()
    base = tmp_path_factory.mktemp("vllm")
    models = [random_qwen2(seed) for seed in range(2)]
    folders = [base / "v0", base / "v1"]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    own_process = ("--distributed-executor-backend", "mp")  # vLLM's default
    server, process = asyncio.run(start_vllm(folders[0], base / "vllm.log", name="one", flags=own_process))
    pool = ServerPool(make_dialect("vllm").health_path)
    yield Served(server, process, pool, models, folders)
    family = psutil.Process(process.pid).children(recursive=True) if process.running else []
    asyncio.run(process.stop())
    asyncio.run(pool.close())
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.parametrize(
    "params", [SamplingParams(48), SamplingParams(48, 0.6), SamplingParams(48, 1.0, 0, (5, 9, 70))]
)
def test_ids_and_logprobs_are_exactly_those_of_the_model(served: Served, params: SamplingParams) -> None:
    asked = [(prompt_of(20 + 7 * n, n), replace(params, seed=n)) for n in range(6)]
    dones = asyncio.run(ask(served.engine(), asked))
    for (prompt, sent), done in zip(asked, dones, strict=True):
        assert (done.version, done.spans) == (0, ())
        assert len(done.token_ids) == len(done.logprobs) <= 48
        assert done.finish_reason == ("length" if len(done.token_ids) == 48 else "stop")
        assert not set(done.token_ids) & set(sent.banned_token_ids)
        assert float(served.distance(0, prompt, done, sent).max()) < EXACT
    assert len({tuple(done.token_ids) for done in dones}) == 6


def test_a_seed_gives_the_same_response_again_and_others_give_others(served: Served) -> None:
    prompt = prompt_of(30, 1)
    seeds = [1, 2, 2**64 - 1]
    twice = [asyncio.run(ask(served.engine(), [(prompt, SamplingParams(24, 1.0, s)) for s in seeds])) for _ in range(2)]
    assert [d.token_ids for d in twice[0]] == [d.token_ids for d in twice[1]]
    assert len({tuple(d.token_ids) for d in twice[0]}) == 3


def test_a_stop_token_ends_a_response_and_belongs_to_it(served: Served) -> None:
    prompt = prompt_of(30, 3)
    (free,) = asyncio.run(ask(served.engine(), [(prompt, SamplingParams(16, 1.0, 4))]))
    stop = free.token_ids[5]
    (bound,) = asyncio.run(ask(served.engine({stop}), [(prompt, SamplingParams(16, 1.0, 4))]))
    assert bound.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert bound.finish_reason == "stop"


def test_a_group_shares_its_prompt_and_no_other_version_does(served: Served) -> None:
    prompt = prompt_of(1500, 5)
    engine = served.engine()

    async def run() -> None:
        await engine.generate(prompt, SamplingParams(4, seed=99), key="group")
        await ask(engine, [(prompt, SamplingParams(4, seed=n)) for n in range(7)], key="group")

    asyncio.run(run())
    assert engine.stats.cached_tokens / engine.stats.prompt_tokens > 0.7

    async def of_another_version() -> int:
        body = engine.dialect.request(prompt, SamplingParams(1), 1, [], replace_version(served.server, 77))
        answer = await served.pool.call(served.server, "POST", engine.dialect.generate_path, body, 60)
        return engine.dialect.read(answer, "one").cached_tokens

    assert asyncio.run(of_another_version()) == 0


def replace_version(server: Server, version: int) -> Server:
    return Server(server.name, server.url, version)


def test_a_prompt_beyond_the_context_is_refused(served: Served) -> None:
    with pytest.raises(RefusedError, match="longer than the maximum model length of 4096"):
        asyncio.run(ask(served.engine(), [(prompt_of(5000, 1), SamplingParams(8))]))
    assert served.pool.usable()


def test_a_folder_that_does_not_fit_changes_nothing(served: Served, tmp_path: Path) -> None:
    other = shutil.copytree(served.folders[1], tmp_path / "cut")
    os.truncate(other / "model.safetensors", (other / "model.safetensors").stat().st_size - 100)
    engine = served.engine()
    with pytest.raises(EngineError, match=r"version 1 cannot be loaded: .* is cut short.* The servers keep 0"):
        asyncio.run(engine.update_from_folder(other, 1))
    prompt, params = prompt_of(40, 8), SamplingParams(16)
    (done,) = asyncio.run(ask(engine, [(prompt, params)]))
    assert (done.version, engine.version) == (0, 0)
    assert float(served.distance(0, prompt, done, params).max()) < EXACT


def test_new_weights_in_the_middle_of_responses(served: Served) -> None:
    engine = served.engine()
    updated, numbers, updates = asyncio.Event(), count(), 0

    async def sampled() -> float:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{served.server.url}/metrics")).text
        return sum(float(r.split()[-1]) for r in text.splitlines() if r.startswith("vllm:generation_tokens_total{"))

    async def keep_asking(tokens: int) -> list[tuple[tuple[list[int], SamplingParams], Completion]]:
        """One response after the other until the weights are new: on a busy machine any one may have ended by then."""
        found = []
        while not updated.is_set():
            one = prompt_of(200, tokens % 2), SamplingParams(tokens, 1.0, next(numbers), (1,))
            found.append((one, (await ask(engine, [one]))[0]))
        return found

    async def run() -> list[tuple[tuple[list[int], SamplingParams], Completion]]:
        nonlocal updates
        jobs = asyncio.gather(*(keep_asking(tokens) for tokens in (2000, 1701, 1402, 1103)))
        while True:
            before, interrupted = await sampled(), engine.stats.interrupted
            while await sampled() < before + 60:
                await asyncio.sleep(0.02)
            await engine.update_from_folder(served.folders[1], 1)
            updates += 1
            if engine.stats.interrupted > interrupted:
                break
            # This process was held up, by a busy disk say, until all had come to their ends: once more from the start.
            await engine.update_from_folder(served.folders[0], 0)
            updates += 1
        updated.set()
        return [one for several in await jobs for one in several]

    def crossed(done: Completion) -> bool:
        """Whether it was cut off after tokens of its own, and went on under the new weights."""
        return [version for version, _ in done.spans][-2:] == [0, 1]

    pairs = asyncio.run(run())
    for _ in range(4):
        if any(crossed(done) for _, done in pairs):
            break
        updated.clear()  # all that were cut off had only just begun: once more
        asyncio.run(engine.update_from_folder(served.folders[0], 0))
        pairs += asyncio.run(run())
        updates += 1
    assert any(crossed(done) for _, done in pairs)
    dones = [done for _, done in pairs]
    assert engine.version == served.server.version == 1
    for (prompt, params), done in pairs:
        assert (len(done.token_ids), done.finish_reason) == (params.max_new_tokens, "length")
        versions = torch.tensor(token_versions(done))
        for version in versions.unique().tolist():
            assert float(served.distance(version, prompt, done, params)[versions == version].max()) < EXACT
            if (versions == version).sum() > 20:  # of a few tokens both weights may think alike
                assert float(served.distance(1 - version, prompt, done, params)[versions == version].mean()) > 0.5
    # How far each had come is a matter of speed. Those that were cut off went on under the new weights, after their own
    # tokens, and they alone.
    stretches = [[version for version, _ in done.spans] or [done.version] for done in dones]
    assert all(one != other for version in stretches for one, other in pairwise(version))
    # One under the new weights alone may have waited for them from its start, or been cut off before its first token.
    assert sum(len(version) - 1 for version in stretches) <= engine.stats.interrupted <= 4 * updates


def test_what_older_weights_left_in_the_cache_is_never_used(served: Served) -> None:
    engine = served.engine()
    prompt, params = prompt_of(1500, 5), SamplingParams(16, seed=3)  # the group's, which version 0 has computed
    first, second = (asyncio.run(ask(engine, [(prompt, params)]))[0] for _ in range(2))
    assert first.version == second.version == 1
    assert float(served.distance(1, prompt, first, params).max()) < EXACT
    assert first.token_ids == second.token_ids
    assert engine.stats.cached_tokens > 1000  # of the second, from the first


def test_a_server_with_other_weights_than_expected_is_not_taken(served: Served) -> None:
    engine = ServedEngine(served.pool, make_dialect("vllm"), served.folders[0], set())
    with pytest.raises(EngineError, match="reports weight version 1, expected 0"):
        asyncio.run(engine.join(Server("stranger", served.server.url)))


@pytest.mark.long
def test_a_server_that_cannot_start_says_why(served: Served, tmp_path: Path) -> None:
    strange = shutil.copytree(served.folders[0], tmp_path / "strange")
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    good = served.folders[0]
    bare = tmp_path / "bin" / "python"  # the tests' own interpreter under another name: it has no vLLM
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath("/proc/self/exe")} -I "$@"\n')
    bare.chmod(0o755)
    wanted = [
        vllm_options(strange, tmp_path / "strange.log", name="strange"),
        vllm_options(good, tmp_path / "long.log", name="long", context_length=100_000),
        vllm_options(good, tmp_path / "flag.log", name="flag", flags=("--no-such-option",)),
        replace(vllm_options(good, tmp_path / "bare.log", name="bare"), python=str(bare)),
    ]

    async def run() -> list[BaseException | Any]:
        return await asyncio.gather(*(launch("vllm", options) for options in wanted), return_exceptions=True)

    errors = asyncio.run(run())
    assert all(isinstance(error, ServerStartError) for error in errors), errors
    reasons = [
        "does not know this model architecture",
        "lower servers.context_length",
        "does not know an option",
        "vLLM is not installed in this Python",
    ]
    for error, options, reason in zip(errors, wanted, reasons, strict=True):
        assert reason in str(error)
        assert f"(log: {options.log})" in str(error)


def test_a_server_with_a_queue_works_and_one_whose_worker_is_stopped_does_not(served: Served) -> None:
    engine, pool, server = served.engine(), served.pool, served.server
    family = psutil.Process(served.process.pid).children(recursive=True)
    (worker,) = (one for one in family if "Worker" in one.name())

    async def waiting() -> int:
        """Requests in its queue."""
        async with httpx.AsyncClient(trust_env=False) as client:
            said = (await client.get(f"{server.url}/metrics")).text
        return sum(int(float(line.split()[-1])) for line in said.splitlines() if "num_requests_waiting{" in line)

    async def run() -> None:
        asked = [(prompt_of(20, n), SamplingParams(4000, 1.0, n, (1,))) for n in range(300)]
        jobs = asyncio.ensure_future(ask(engine, asked))
        while not await waiting():
            assert not jobs.done()
        await engine.dialect.check_working(pool, server, 60.0)
        assert await waiting()
        worker.suspend()
        try:
            with pytest.raises(ServerLostError, match="/collective_rpc did not answer within 3 s"):
                await engine.dialect.check_working(pool, server, 3.0)
            assert await pool.healthy(server)
        finally:
            worker.resume()
        await engine.dialect.check_working(pool, server, 60.0)
        jobs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await jobs
        assert (server.problem, server.in_flight) == ("", 0)
        with pytest.raises(ServerFailedError, match="|".join(NO_METHOD)):
            await pool.call(server, "POST", "/collective_rpc", {"method": "check_what_is_not_there"}, 60.0)

    asyncio.run(run())


def test_a_killed_server_ends_what_waits_for_it_with_the_reason(served: Served) -> None:
    engine = served.engine()

    async def run() -> None:
        # Without the token that ends one: on a busy machine the kill may come late, and must find all four at work.
        asked = [(prompt_of(50, n), SamplingParams(4000, 1.0, n, (1,))) for n in range(4)]
        jobs = asyncio.ensure_future(ask(engine, asked))
        while served.server.in_flight < 4:
            if jobs.done():  # this process was held up for as long as a response takes: once more
                await jobs
                jobs = asyncio.ensure_future(ask(engine, asked))
            await asyncio.sleep(0.01)
        (process,) = psutil.Process(served.process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"no inference server is left \(one: "):
            await jobs
        async with asyncio.timeout(60.0):
            while not served.server.problem.startswith("it "):  # told a moment after it is no longer running
                await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match=r"no inference server is left \(one: it was ended by SIGKILL.*vllm.log"):
            await engine.generate([5], SamplingParams(8))

    asyncio.run(run())
