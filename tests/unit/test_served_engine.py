"""What the engine over servers sends and gives back, which servers it takes, and when servers misbehave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from httpstub import HttpStub
from servedrig import PARAMS, FaultyServer, Rig, run_scenario
from tokenversions import token_versions

from trainer.engines.base import EngineError
from trainer.engines.http import Server
from trainer.types import SamplingParams

Scenario = Callable[[Callable[[Rig], Awaitable[None]]], None]


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return partial(run_scenario, lambda: Rig(tmp_path))


def test_ids_logprobs_and_version_come_back_and_the_cache_is_kept_apart_by_version(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        done = await rig.engine.generate([5, 6], SamplingParams(3, seed=2**64 - 1), key="g")
        assert (done.token_ids, done.logprobs, done.finish_reason) == ([102, 103, 104], [-0.5] * 3, "length")
        assert (done.version, done.spans, token_versions(done)) == (0, (), [0, 0, 0])
        await rig.update(3)
        assert (await rig.engine.generate([5, 6], PARAMS)).version == rig.engine.version == 3
        sent = [b for _, p, b in rig.stubs[0].seen if p == "/generate"]
        assert [b["extra_key"] for b in sent] == ["probe", "v0", "v3"]
        assert sent[1]["input_ids"] == [5, 6]
        assert 0 <= sent[1]["sampling_params"]["sampling_seed"] < 2**63
        assert sent[1]["sampling_params"]["top_p"] == 1.0
        assert rig.engine.stats.cached_tokens == 2

    scenario(body)


def test_a_server_that_dies_while_it_is_sampling(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        for _ in range(2):
            await rig.add()
        key = next(k for k in map(str, range(99)) if rig.pool.choose(k).name == "s0")
        rig.faults[0].hold = 2
        job = asyncio.create_task(rig.engine.generate([1], PARAMS, key=key))
        await rig.started(0, 1)
        rig.stubs[0].die()
        assert (await job).token_ids == [101, 102, 103, 104, 105, 106]
        assert rig.pool.redispatched == 1

    scenario(body)


def test_a_server_that_was_started_anew_is_not_believed(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        fault = FaultyServer()
        await rig.add(fault)
        await rig.update(4)
        fault.version = 0
        dones = await asyncio.gather(*(rig.engine.generate([1], PARAMS, key=str(n)) for n in range(20)))
        assert {done.version for done in dones} == {4}
        assert "answered with weight version 0, expected 4" in rig.pool.servers[1].problem

    scenario(body)


def test_a_server_that_joins_later_gets_the_present_weights(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        await rig.update(1)
        late = await rig.add()
        assert late.version == 1
        updates = [b for _, p, b in rig.stubs[1].seen if p == "/update_weights_from_disk"]
        assert [(Path(b["model_path"]).name, b["weight_version"]) for b in updates] == [("v1", "1")]

    scenario(body)


def test_a_server_of_an_unknown_version_gets_the_present_weights(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        rig.stubs.append(await HttpStub(FaultyServer(version="who knows")).__aenter__())
        server = Server("old", rig.stubs[0].url, version=-1)
        await rig.engine.join(server)
        assert server.version == 0
        assert rig.stubs[0].count("/abort_request") == 1  # of an earlier trainer
        assert (await rig.engine.generate([1], PARAMS)).version == 0

    scenario(body)


def test_a_server_that_joins_during_an_update_waits_for_it_and_gets_the_new_weights(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = FaultyServer()
        await rig.add(fault)
        fault.hold = 2
        job = asyncio.create_task(rig.engine.generate([1], PARAMS))
        await rig.started(0, 1)
        joining: list[asyncio.Task[Server]] = []

        async def load(server: Server) -> None:
            joining.append(asyncio.create_task(rig.add()))
            while not (len(rig.stubs) == 2 and rig.stubs[1].count("/generate")):  # it has been found to be well
                await asyncio.sleep(0.01)
            assert [s.name for s in rig.pool.usable()] == ["s0"]
            await rig.engine.dialect.load_folder(rig.pool, server, rig.write(rig.tmp_path / "v1"), 1)

        await rig.engine.update(1, load, rig.tmp_path / "v1")
        await asyncio.gather(job, *joining)
        assert [s.version for s in rig.pool.usable()] == [1, 1]

    scenario(body)


def test_an_unknown_version_is_told_and_one_that_lacks_fields_is_refused(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(rig: Rig) -> None:
        with caplog.at_level(logging.WARNING):
            fault = FaultyServer()
            fault.sglang = "0.9.9"
            await rig.add(fault)
            assert "runs SGLang 0.9.9; this code was tried with 0.5.17 only" in caplog.text
        poor = FaultyServer()
        poor.fields_missing = ("output_token_logprobs",)
        with pytest.raises(EngineError, match=r"does not return meta_info\.output_token_logprobs"):
            await rig.add(poor)
        with pytest.raises(EngineError, match="reports weight version 8, expected 0"):
            await rig.add(FaultyServer(version=8))

    scenario(body)


def test_responses_cut_off_for_no_reason_end_in_an_error(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = FaultyServer()
        await rig.add(fault)
        fault.hold = 0
        fault.aborted.set()
        with pytest.raises(EngineError, match="cut one response off"):
            await rig.engine.generate([1], PARAMS)

    scenario(body)
