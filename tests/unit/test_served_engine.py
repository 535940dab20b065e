"""What the engine over servers does when servers misbehave, when weights change under way, and what it asks for.

The server here is a stand-in with SGLang's routes, for faults that a real one cannot be told to have; that the routes
and fields are SGLang's is shown by tests/gpu/test_sglang.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.httpstub import Answer, Hang, HttpStub
from trainer.engines.base import EngineError
from trainer.engines.dialect import UntouchedError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.types import SamplingParams

MODEL = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "tie_word_embeddings": False}
PARAMS = SamplingParams(max_new_tokens=6, seed=7)
FAST = Limits(connect=1.0, request=10.0, control=2.0, health=0.5, attempts=3, backoff=0.01)


class FaultyServer:
    """Samples 100, 101, … one token at a time. `hold`: stop before that token until let go or aborted."""

    def __init__(self, version: int | str = 0) -> None:
        self.version = version
        self.hold: int | None = None
        self.sglang = "0.5.17"
        self.update_answer: Answer | None = None
        self.fields_missing: tuple[str, ...] = ()
        self.free = asyncio.Event()
        self.aborted = asyncio.Event()

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        route = path.partition("?")[0]
        if route == "/generate":
            return await self.generate(body)
        if route == "/abort_request":
            self.aborted.set()
        if route == "/update_weights_from_disk":
            if self.update_answer is not None:
                return self.update_answer
            self.version, self.hold = body["weight_version"], None
            return 200, {"success": True}
        if route == "/server_info":
            return 200, {"version": self.sglang}
        if route == "/model_info":
            return 200, {"weight_version": str(self.version)}
        return 200, {}

    async def generate(self, body: dict[str, Any]) -> Answer:
        wanted = body["sampling_params"]["max_new_tokens"]
        count, finish = wanted, {"type": "length"}
        if self.hold is not None and self.hold < wanted:
            waits = [asyncio.create_task(event.wait()) for event in (self.free, self.aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.aborted.is_set():
                count, finish = self.hold, {"type": "abort"}
        first = len(body["input_ids"])
        meta = {
            "output_token_logprobs": [[-0.5, 100 + first + n, None] for n in range(count)],
            "finish_reason": finish,
            "weight_version": str(self.version),
            "prompt_tokens": first,
            "cached_tokens": first // 2,
        }
        return 200, {"meta_info": {name: value for name, value in meta.items() if name not in self.fields_missing}}


def write_model(folder: Path, rows: int = 4, names: tuple[str, ...] = ("embed", "head")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(rows, 2) for name in names}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


class Rig:
    """Servers, their engine, and the folders that it publishes."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.model = write_model(tmp_path / "model")
        self.pool = ServerPool("/health", FAST)
        self.engine = ServedEngine(self.pool, make_dialect("sglang"), self.model, {2})
        self.faults: list[FaultyServer] = []
        self.stubs: list[HttpStub] = []
        self.write: Callable[[Path], Path] = write_model

    async def update(self, version: int) -> None:
        """Publish weights to a folder, and from there to the servers."""
        await self.engine.update_from_folder(self.write(self.tmp_path / f"v{version}"), version)

    async def add(self, fault: FaultyServer | None = None) -> Server:
        self.faults.append(fault or FaultyServer())
        self.stubs.append(await HttpStub(self.faults[-1]).__aenter__())
        server = Server(f"s{len(self.stubs) - 1}", self.stubs[-1].url)
        await self.engine.join(server)
        return server

    async def started(self, number: int, requests: int) -> None:
        """Wait until a server has got so many requests (the probe of joining is one)."""
        while self.stubs[number].count("/generate") < requests + 1:
            await asyncio.sleep(0.01)


@pytest.fixture
def scenario(tmp_path: Path) -> Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]:
    def run(body: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            rig = Rig(tmp_path)
            try:
                await body(rig)
            finally:
                await rig.pool.close()
                for stub in rig.stubs:
                    stub.die()

        asyncio.run(main())

    return run


Scenario = Callable[[Callable[[Rig], Coroutine[Any, Any, None]]], None]


def test_ids_logprobs_and_version_come_back_and_the_cache_is_kept_apart_by_version(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        await rig.add()
        done = await rig.engine.generate([5, 6], SamplingParams(3, seed=2**64 - 1), key="g")
        assert (done.token_ids, done.logprobs, done.finish_reason) == ([102, 103, 104], [-0.5] * 3, "length")
        assert (done.version, done.spans, done.token_versions) == (0, (), [0, 0, 0])
        await rig.update(3)
        assert (await rig.engine.generate([5, 6], PARAMS)).version == rig.engine.version == 3
        sent = [b for _, p, b in rig.stubs[0].seen if p == "/generate"]
        assert [b["extra_key"] for b in sent] == ["probe", "v0", "v3"]
        assert sent[1]["input_ids"] == [5, 6]
        assert 0 <= sent[1]["sampling_params"]["sampling_seed"] < 2**63
        assert sent[1]["sampling_params"]["top_p"] == 1.0
        assert rig.engine.stats.cached_tokens == 2

    scenario(body)


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
            assert done.token_versions == [0, 0, 1, 1, 1, 1]
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
        assert await rig.engine.health()
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


def test_health(scenario: Scenario) -> None:
    async def body(rig: Rig) -> None:
        assert not await rig.engine.health()
        await rig.add()
        assert await rig.engine.health()
        rig.stubs[0].die()
        assert not await rig.engine.health()

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
