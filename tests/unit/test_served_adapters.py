"""New adapters beside those in use; with a real server in tests/integration/test_lora_vllm.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from httpstub import Answer
from safetensors.torch import save_file
from servedrig import FAST, PARAMS, FaultyServer, Rig, run_scenario, write_model

from trainer.adapter_folder import CONFIG, PREFIX, WEIGHTS
from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine

Scenario = Callable[[Callable[[Rig], Awaitable[None]]], None]


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    halves = {"A": torch.zeros(1, 2), "B": torch.zeros(4, 1)}
    save_file({f"{PREFIX}embed.lora_{half}.weight": one for half, one in halves.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text("{}")
    return folder


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    def rig() -> Rig:
        made = Rig(tmp_path)
        write_model(made.model, names=("embed.weight", "head.weight"))
        made.engine.dialect.adapters, made.engine.versions, made.write = True, 2, write_adapter
        return made

    return partial(run_scenario, rig)


def test_responses_of_every_process_end_under_the_version_that_they_began_with(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        server = await rig.add()
        fault = rig.faults[0]
        beside = ServedEngine(ServerPool("/health", FAST), make_dialect("sglang", adapters=True), rig.model, {2})
        beside.pool.add(Server(server.name, server.url))

        class Others:
            async def hold(self) -> None:
                raise AssertionError("nothing is held")

            async def idle(self) -> None:
                raise AssertionError("nothing is held")

            def go_on(self) -> None:
                beside.go_on(rig.engine.version)

        rig.engine.others = Others()
        fault.hold = 2
        jobs = [asyncio.create_task(engine.generate([5, 6], PARAMS)) for engine in (rig.engine, beside)]
        await rig.started(0, 2)
        await rig.update(1)
        fault.free.set()
        for done in await asyncio.gather(*jobs):
            assert (done.version, done.spans, done.token_ids) == (0, (), [102, 103, 104, 105, 106, 107])
        for engine in (rig.engine, beside):
            assert (await engine.generate([5, 6], PARAMS)).version == 1
        assert [body.get("lora_path") for _, path, body in rig.stubs[0].seen if path == "/generate"][-2:] == ["v1"] * 2
        await rig.update(2)
        assert fault.adapters == ["v1", "v2"]  # of version 1 there may be responses
        await rig.update(3)
        assert fault.adapters == ["v2", "v3"]
        assert not rig.stubs[0].count("/pause_generation")
        await beside.pool.close()

    scenario(body)


def test_a_server_that_cannot_load_an_adapter_is_used_no_more_until_it_joins_again(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        fault = FaultyServer()
        behind = await rig.add(fault)
        fault.update_answer = (400, {"error_message": "no memory"})
        await rig.update(1)
        assert [server.name for server in rig.pool.usable()] == ["s0"]
        assert "stayed behind at weight version 0" in behind.problem
        assert not behind.doubtful
        fault.update_answer = None
        again = Server("s1", behind.url, await rig.engine.dialect.held_version(rig.pool, behind))
        await rig.engine.join(again)
        assert (fault.adapters, again.version, len(rig.pool.usable())) == (["v1"], 1, 2)

    scenario(body)


class LateServer(FaultyServer):
    """A request reaches its queue only after it was told to cut off for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.late = asyncio.Event()
        self.under_way, self.at_pause = 0, -1

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        if path == "/abort_request" and not self.late.is_set():
            self.late.set()
            return 200, {}
        if path == "/pause_generation":
            self.at_pause = self.under_way
        return await super().__call__(method, path, body)

    async def generate(self, body: dict[str, Any]) -> Answer:
        if body.get("extra_key") == "probe":
            return await super().generate(body)
        self.under_way += 1
        await self.late.wait()
        answer = await super().generate(body)
        self.under_way -= 1
        return answer


def test_a_server_that_joins_again_is_not_paused_before_it_has_answered(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = LateServer()
        behind = await rig.add(fault)
        fault.hold = 2
        job = asyncio.create_task(rig.engine.generate([5, 6], PARAMS))
        await rig.started(0, 1)
        await rig.add()
        fault.update_answer = (400, {"error_message": "no memory"})
        await rig.update(1)
        fault.update_answer = None
        await rig.engine.join(Server("s0", behind.url))
        assert fault.at_pause == 0
        assert (await job).spans == ((0, 2), (1, 4))

    scenario(body)


def test_servers_that_cannot_load_an_adapter_keep_theirs(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = FaultyServer()
        await rig.add(fault)
        fault.update_answer = (400, {"error_message": "no memory"})
        with pytest.raises(EngineError, match=r"no server took weight version 1: .*no memory"):
            await rig.update(1)
        assert (await rig.engine.generate([5], PARAMS)).version == 0
        rig.stubs[0].die()
        with pytest.raises(EngineGoneError):
            await rig.update(2)

    scenario(body)
