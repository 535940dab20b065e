"""A real vLLM server on the CPU that keeps the base's weights and gets adapters alone from the trainer's publisher."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from builders import random_prompts, small_config
from safetensors.torch import load_file, save_file

from tests.vllmserver import VOCABULARY, random_qwen2, start_vllm, vllm_python
from trainer.adapter_folder import CONFIG, WEIGHTS
from trainer.engines.base import EngineError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.rollout.background import BackgroundLoop
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.train.loading import Origin
from trainer.train.lora import adapters_off
from trainer.types import Completion, Row, SamplingParams
from trainer.weights.choose import make_adapter_publisher
from trainer.weights.publisher import Outlet

EXACT = 1e-3
"""Largest |difference| of log-probs: float32 on both sides, sums in another order."""


class NoTokenizer:
    """The model has none."""

    def save_pretrained(self, folder: Path) -> None:
        raise AssertionError(folder)


def moved(learner: Learner, seed: int) -> None:
    """Give the adapters other values, as if they had learned."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, 0, 0.2, generator=generator)


Pairs = list[tuple[list[int], Completion]]


async def ask(engine: ServedEngine, count: int, length: int, banned: tuple[int, ...] = ()) -> Pairs:
    """Prompts with their responses."""
    prompts = random_prompts(count, 20, 200, VOCABULARY)
    params = (SamplingParams(length, seed=i, banned_token_ids=banned) for i in range(count))
    asked = (engine.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True))
    return list(zip(prompts, await asyncio.gather(*asked), strict=True))


def sampled(loop: BackgroundLoop, engine: ServedEngine) -> Pairs:
    return loop.run(ask(engine, 4, 24))


async def under_way(server: Server, version: int, requests: int) -> None:
    """Wait until the server is at so many requests of a version."""
    async with asyncio.timeout(60):
        while server.versions[version] < requests:
            await asyncio.sleep(0.01)


def gap(learner: Learner, pairs: Pairs) -> float:
    """Largest difference of the server's log-probs from the trainer's."""
    rows = [Row(p, c.token_ids, c.logprobs, 1.0, 1.0, i) for i, (p, c) in enumerate(pairs)]
    own = learner.logprobs(rows)
    return max(
        abs(a - b)
        for row, values in zip(rows, own, strict=True)
        for a, b in zip(row.behave_logprobs, values, strict=True)
    )


def test_a_server_samples_with_each_adapter_that_is_published(tmp_path: Path) -> None:
    vllm_python()
    random_qwen2(0).save_pretrained(tmp_path / "base")
    config = small_config("model.lora.rank=4", "servers.engine=vllm", "train.max_tokens_per_mb=512")
    world = single_world()
    learner = Learner(Origin(tmp_path / "base", config, world).lm, config, world, 10)
    server, process = asyncio.run(
        start_vllm(tmp_path / "base", tmp_path / "vllm.log", name="one", lora_rank=4, lora_versions=2)
    )
    loop, pool = BackgroundLoop(), ServerPool(make_dialect("vllm").health_path)
    try:
        engine = ServedEngine(pool, make_dialect("vllm", adapters=True), tmp_path / "base", set())
        engine.versions = 2
        loop.run(engine.join(server))
        routes = engine.dialect.adapter_routes
        publisher = make_adapter_publisher(
            learner, Outlet(engine, loop.submit), NoTokenizer(), config.weights, tmp_path
        )
        assert gap(learner, sampled(loop, engine)) < EXACT  # version 0 is the base, as are new adapters
        for version in (1, 2):
            before = sampled(loop, engine)
            moved(learner, version)
            stats = publisher.publish(version)
            pairs = sampled(loop, engine)
            assert {done.version for _, done in pairs} == {version}
            assert gap(learner, pairs) < EXACT
            assert gap(learner, before) > 0.5
            assert (stats.servers, stats.bytes) == (
                1,
                4 * sum(p.numel() for p in learner.policy.parameters() if p.requires_grad),
            )
            assert stats.interruption_seconds == 0

        # Responses under way end whole under the version that they began with, new ones begin under the new one.
        begun = loop.submit(ask(engine, 6, 200))
        loop.run(under_way(server, 2, 6))
        moved(learner, 3)
        stats = publisher.publish(3)
        fresh = sampled(loop, engine)
        assert (stats.interruption_seconds, engine.stats.interrupted) == (0, 0)
        assert {done.version for _, done in fresh} == {3}
        assert gap(learner, fresh) < EXACT
        assert loop.run(routes.versions(pool, server)) == [2, 3]  # no response of ours can be under version 1
        old = begun.result(120)
        assert {(done.version, done.spans) for _, done in old} == {(2, ())}
        assert gap(learner, old) > 0.5
        moved(learner, 2)
        assert gap(learner, old) < EXACT
        # Where servers keep fewer versions than are in use, these are cut off, and go on under the new one.
        engine.versions = 1
        moved(learner, 4)
        for present in range(4, 14):  # until the responses are still under way when the version comes
            before = engine.stats.interrupted
            cut = loop.submit(ask(engine, 2, 500, banned=(1,)))  # which would end them early
            loop.run(under_way(server, present - 1, 2))
            sampled(loop, engine)  # in the same batches: those have tokens then, too
            paused = publisher.publish(present)
            spans = {tuple(version for version, _ in done.spans) for _, done in cut.result(120)}
            if engine.stats.interrupted == before + 2:
                break
        print(f"seconds: {stats.transfer_seconds:.3f} beside responses, {paused.interruption_seconds:.3f} with a pause")
        assert paused.interruption_seconds > 0
        assert spans == {(present - 1, present)}
        assert loop.run(routes.versions(pool, server)) == [present]
        # Of an adapter that cannot be loaded nothing is left: the server goes on under the present version.
        wide = shutil.copytree(publisher.root / f"v{present}", tmp_path / "wide")
        wider = {
            name: torch.cat([t] * 4, 0 if ".lora_A." in name else 1) for name, t in load_file(wide / WEIGHTS).items()
        }
        save_file(wider, wide / WEIGHTS)
        (wide / CONFIG).write_text((wide / CONFIG).read_text().replace('"r": 4', '"r": 16'))
        with pytest.raises(EngineError, match=r"no server took weight version \d+: .* rank 16"):
            loop.run(engine.update_from_folder(wide, present + 1))
        pairs = sampled(loop, engine)
        assert {done.version for _, done in pairs} == {present}
        assert gap(learner, pairs) < EXACT

        # A server that comes back has the base, and gets the present adapter as it joins.
        loop.run(engine.leave(server))
        again = Server("again", server.url, version=-1)
        loop.run(engine.join(again))
        assert gap(learner, sampled(loop, engine)) < EXACT
        # Another attempt at the run takes the server over, and begins with the base.
        loop.run(engine.leave(again))
        fresh = ServedEngine(pool, make_dialect("vllm", adapters=True), tmp_path / "base", set())
        loop.run(fresh.join(Server("over", server.url, version=-1)))
        pairs = sampled(loop, fresh)
        with adapters_off(learner.policy):
            assert gap(learner, pairs) < EXACT
        assert gap(learner, pairs) > 0.5
        wrong = shutil.copytree(publisher.root / f"v{present}", tmp_path / "wrong")
        (wrong / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(EngineError, match=r"version 3 cannot be loaded: .*adapter_model\.safetensors"):
            loop.run(engine.update_from_folder(wrong, 3))
        publisher.close()
    finally:
        asyncio.run(process.stop())
        loop.close()
        asyncio.run(pool.close())
