"""New weights for the engine's servers: what is under way goes on under them, and what fails leaves none in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from httpstub import Answer, Hang
from servedrig import FAST, PARAMS, FaultyServer, Rig, run_scenario, write_model
from tokenversions import token_versions

from trainer.engines.base import EngineError
from trainer.engines.dialect import UntouchedError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.types import SamplingParams

Scenario = Callable[[Callable[[Rig], Awaitable[None]]], None]


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return partial(run_scenario, lambda: Rig(tmp_path))


def test_an_update_cuts_responses_off_and_they_go_on_from_their_own_tokens(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = FaultyServer()
        await rig.add(fault)
        fault.hold = 2
        jobs = [asyncio.create_task(rig.engine.generate([1, 2, 3], PARAMS, key="g")) for _ in range(8)]
        await rig.started(0, 8)
        await rig.update(1)
        for done in await asyncio.gather(*jobs):
            assert done.token_ids == [103, 104, 105, 106, 107, 108]
            assert done.spans == ((0, 2), (1, 4))
            assert done.version == 0
            assert token_versions(done) == [0, 0, 1, 1, 1, 1]
        assert rig.engine.stats.interrupted == 8
        calls = [p.partition("?")[0] for _, p, _ in rig.stubs[0].seen if p not in ("/generate", "/abort_request")]
        assert calls[-5:] == [
            "/pause_generation", "/flush_cache", "/update_weights_from_disk", "/model_info", "/continue_generation",
        ]  # fmt: skip
        again = [b for _, p, b in rig.stubs[0].seen if p == "/generate"][-1]
        assert again["input_ids"] == [1, 2, 3, 103, 104]
        assert again["sampling_params"]["max_new_tokens"] == 4

    scenario(body)


def test_nothing_is_sent_during_a_pause(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        await rig.engine.pause()
        job = asyncio.create_task(rig.engine.generate([1], PARAMS))
        await rig.update(1)  # leaves the pause as it was
        assert not job.done()
        assert rig.stubs[0].count("/generate") == 1
        await rig.engine.resume()
        assert (await job).version == 1

    scenario(body)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda folder: write_model(folder, names=("embed",)), "lacks 1 of 2 tensors, head"),
        (lambda folder: write_model(folder, rows=5), r"embed has shape \(5, 2\)"),
        (lambda folder: folder, "holds no .safetensors"),
    ],
)
def test_a_folder_that_does_not_fit_reaches_no_server(scenario: Scenario, write: Any, reason: str) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        rig.write = write
        with pytest.raises(EngineError, match=f"version 1 cannot be loaded: .*{reason}.* The servers keep 0"):
            await rig.update(1)
        assert rig.stubs[0].count("/update_weights_from_disk") == 0
        assert (await rig.engine.generate([1], PARAMS)).version == rig.engine.version == 0

    scenario(body)


def test_a_cut_file_reaches_no_server(scenario: Scenario) -> None:
    def cut(folder: Path) -> Path:
        file = write_model(folder) / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-3])
        return folder

    async def body(rig: Rig) -> None:
        await rig.add()
        rig.write = cut
        with pytest.raises(EngineError, match="is cut short"):
            await rig.update(1)

    scenario(body)


def test_a_failed_update_that_changed_nothing_keeps_the_old_weights_in_use(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        fault = FaultyServer()
        await rig.add(fault)
        fault.update_answer = (400, {"success": False, "message": "Failed to get weights iterator: no such file."})
        with pytest.raises(EngineError, match="no server took weight version 1"):
            await rig.update(1)
        assert (await rig.engine.generate([1], PARAMS)).version == 0
        fault.update_answer = None
        await rig.update(2)
        assert rig.engine.version == 2

    scenario(body)


@pytest.mark.parametrize(
    "answer",
    [
        (400, {"success": False, "message": "Failed to update weights: x.\nRolling back to original weights."}),
        (500, {"detail": "scheduler died"}),
        (200, {"success": True}),  # but the version that it reports stays the old one
    ],
)
def test_a_server_whose_weights_are_in_doubt_is_used_no_more(scenario: Scenario, answer: Answer) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        fault = FaultyServer()
        await rig.add(fault)
        fault.update_answer = answer
        await rig.update(1)
        assert [s.name for s in rig.pool.usable()] == ["s0"]
        assert "in doubt" in rig.pool.servers[1].problem
        dones = await asyncio.gather(*(rig.engine.generate([1], PARAMS, key=str(n)) for n in range(20)))
        assert {done.version for done in dones} == {1}

    scenario(body)


def test_a_server_that_stays_behind_is_used_no_more(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        fault = FaultyServer()
        await rig.add(fault)
        fault.update_answer = (400, {"message": "Failed to get weights iterator: no such file."})
        await rig.update(1)
        assert [s.name for s in rig.pool.usable()] == ["s0"]
        assert "stayed behind at weight version 0" in rig.pool.servers[1].problem

    scenario(body)


@pytest.mark.parametrize(
    ("failure", "still_used"),
    [
        (UntouchedError("no peer came"), ["s0", "s1"]),
        (EngineError("it broke in the middle"), []),
        (ValueError("a mistake"), []),
    ],
)
def test_weights_that_come_another_way(scenario: Scenario, failure: Exception, still_used: list[str]) -> None:
    async def body(rig: Rig) -> None:
        for _ in range(2):
            await rig.add()
        together = asyncio.Barrier(2)

        async def bring(server: Server) -> None:
            await together.wait()  # both at the same moment, as members of one collective
            fault = rig.faults[rig.pool.servers.index(server)]
            fault.version = "1"

        await rig.engine.update(1, bring)
        assert [s.version for s in rig.pool.usable()] == [1, 1]
        with pytest.raises(EngineError, match="version 1 is in no folder"):
            await rig.add()

        async def fail(server: Server) -> None:
            raise failure

        with pytest.raises(type(failure) if isinstance(failure, ValueError) else EngineError, match=str(failure)):
            await rig.engine.update(2, fail)
        assert [s.name for s in rig.pool.usable()] == still_used
        assert rig.engine.version == 1
        if still_used:
            assert (await rig.engine.generate([1], PARAMS)).version == 1

    scenario(body)


def test_an_update_that_is_broken_off_leaves_no_doubtful_weights_in_use(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        for _ in range(2):
            await rig.add()
        loading = asyncio.Event()

        async def load(server: Server) -> None:
            if server.name == "s1":
                loading.set()
                await asyncio.Event().wait()
            rig.faults[0].version = "1"

        job = asyncio.create_task(rig.engine.update(1, load))
        await loading.wait()
        while rig.pool.servers[0].version == 0:
            await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert rig.pool.usable() == []
        with pytest.raises(EngineError, match="s0: an update to weight version 1 was broken off; s1: its weights"):
            await rig.engine.generate([1], PARAMS)

    scenario(body)


def test_hanging_servers_do_not_hang_the_update(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        fault = FaultyServer()
        await rig.add(fault)

        async def dead_scheduler(method: str, path: str, body: dict[str, Any]) -> Answer:
            return Hang()

        rig.stubs[1].handler = dead_scheduler
        await rig.update(1)
        assert [s.name for s in rig.pool.usable()] == ["s0"]

    scenario(body)


def test_requests_of_other_processes_are_cut_off_too_and_go_on_under_the_new_weights(scenario: Scenario) -> None:
    """Controllers in processes of their own send to servers whose weights rank 0 changes."""

    async def body(rig: Rig) -> None:
        server = await rig.add()
        beside = ServedEngine(ServerPool("/health", FAST), make_dialect("sglang"), rig.model, {2})
        beside.pool.add(Server(server.name, server.url))

        class Others:
            async def hold(self) -> None:
                await beside.hold()

            async def idle(self) -> None:
                await beside.idle()

            def go_on(self) -> None:
                beside.go_on(rig.engine.version)

        rig.engine.others = Others()
        rig.faults[0].hold = 2
        job = asyncio.create_task(beside.generate([5, 6], PARAMS))
        await rig.started(0, 1)
        await rig.update(1)

        done = await job
        assert done.spans == ((0, 2), (1, 4))
        assert done.token_ids == [102, 103, 104, 105, 106, 107]
        assert (await beside.generate([5], SamplingParams(1))).version == 1
        await beside.pool.close()

    scenario(body)
