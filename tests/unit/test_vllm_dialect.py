"""What vLLM's dialect does with answers and servers that a real one cannot be told to give.

The server here is a stand-in with vLLM's routes; tests/integration/test_vllm_engine.py shows that they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.httpstub import Answer, HttpStub
from trainer.engines.base import EngineError
from trainer.engines.http import Limits, Server, ServerFailedError, ServerPool
from trainer.engines.options import ServerOptions, Setting
from trainer.engines.served import ServedEngine
from trainer.engines.vllm_dialect import VLLMDialect, _warn_of_prefill_delay
from trainer.types import SamplingParams

FAST = Limits(connect=1.0, request=10.0, control=2.0, health=0.5, attempts=3, backoff=0.01)


class StandIn:
    """Samples 7, 8, … in one go. `spans`: the weight versions that it claims, in place of its own."""

    def __init__(self) -> None:
        self.version = "default"
        self.spans: list[dict[str, Any]] | None = None
        self.vllm = "0.32.0"
        self.missing = ""
        self.extra_logprobs = 0
        self.empties_its_cache = True
        self.check: Answer = 200, {"results": [None]}

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        route = path.partition("?")[0]
        if route == "/update_weight_version":
            self.version = body["new_version"]
        if route == "/collective_rpc":
            return self.check
        answers: dict[str, Any] = {
            "/version": {"version": self.vllm},
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": self.empties_its_cache},
        }
        return 200, self.sampled(body) if route == VLLMDialect.generate_path else answers.get(route, {})

    def sampled(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = list(range(7, 7 + body["sampling_params"]["max_tokens"]))
        entries = [{"token_id": token, "logprob": -0.5} for token in ids + [1] * self.extra_logprobs]
        choice = {
            "token_ids": ids,
            "logprobs": {"content": entries},
            "finish_reason": "length",
            "weight_versions": self.spans or [{"version": self.version, "start": 0, "end": len(ids)}],
        }
        choice.pop(self.missing, None)
        return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}


Scenario = Callable[[ServedEngine, list[StandIn]], Coroutine[Any, Any, None]]


def run(scenario: Scenario, count: int = 1) -> None:
    """Run a scenario with an engine over so many stand-ins, which are named s0, s1, …"""

    async def main() -> None:
        ones = [StandIn() for _ in range(count)]
        engine = ServedEngine(ServerPool(VLLMDialect.health_path, FAST), VLLMDialect(), Path("model"), set())
        stubs = [await HttpStub(one).__aenter__() for one in ones]
        try:
            for number, stub in enumerate(stubs):
                await engine.join(Server(f"s{number}", stub.url))
            await scenario(engine, ones)
        finally:
            await engine.pool.close()
            for stub in stubs:
                stub.die()

    asyncio.run(main())


def test_a_server_is_told_the_version_of_the_weights_that_it_was_started_with() -> None:
    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        assert ones[0].version == "0"
        done = await engine.generate([5], SamplingParams(3))
        assert (done.token_ids, done.logprobs, done.version) == ([7, 8, 9], [-0.5] * 3, 0)

    run(scenario)


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([{"version": "default", "start": 0, "end": 3}], "an unknown weight version"),  # it was started anew
        ([{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 3}], "an unknown weight version"),
        ([{"version": "4", "start": 0, "end": 3}], "weight version 4"),
    ],
)
def test_a_server_whose_weights_were_changed_by_others_is_not_believed(spans: list[dict[str, Any]], said: str) -> None:
    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        ones[0].spans = spans
        dones = await asyncio.gather(*(engine.generate([5], SamplingParams(3), key=str(n)) for n in range(20)))
        assert {done.version for done in dones} == {0}
        assert [server.name for server in engine.pool.usable()] == ["s1"]
        assert f"answered with {said}, expected 0" in engine.pool.servers[0].problem

    run(scenario, count=2)


def test_logprobs_of_other_tokens_are_an_error() -> None:
    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        ones[0].extra_logprobs = 1
        with pytest.raises(EngineError, match=r"s0 sent an answer that cannot be read .*3 tokens with 4 log-probs"):
            await engine.generate([5], SamplingParams(3))

    run(scenario)


def test_a_server_that_keeps_its_cache_is_used_no_more() -> None:
    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        ones[0].empties_its_cache = False

        async def load(server: Server) -> None:
            ones[1].version = "1"

        await engine.update(1, load)
        assert [server.name for server in engine.pool.usable()] == ["s1"]
        assert "did not empty its prefix cache: something else is using" in engine.pool.servers[0].problem

    run(scenario, count=2)


@pytest.mark.parametrize("missing", ["token_ids", "logprobs", "finish_reason", "weight_versions"])
def test_a_server_that_lacks_fields_is_refused(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        other = StandIn()
        other.vllm, other.missing = "0.30.0", missing
        async with HttpStub(other) as stub:
            with (
                caplog.at_level(logging.WARNING),
                pytest.raises(EngineError, match=rf"\(vLLM 0.30.0\) does not return choices\[0\].{missing}, .* 0.32.0"),
            ):
                await engine.join(Server("old", stub.url))
        assert "old runs vLLM 0.30.0; this code was tried with 0.32.0 only" in caplog.text
        assert [server.name for server in engine.pool.usable()] == ["s0"]

    run(scenario)


@pytest.mark.parametrize(
    "unknown",
    [
        "Method 'check_health' is not implemented.",
        "Worker failed with error ''CPUWorker' object has no attribute 'check_health'', please check the stack trace",
    ],
)
def test_a_worker_that_does_not_know_the_question_has_answered(unknown: str) -> None:
    """That this is what one says is shown by tests/integration/test_vllm_engine.py."""

    async def scenario(engine: ServedEngine, ones: list[StandIn]) -> None:
        (server,) = engine.pool.usable()
        await engine.dialect.check_working(engine.pool, server, 5.0)
        ones[0].check = 500, {"error": {"message": f"Call to collective_rpc method failed: {unknown}", "code": 500}}
        await engine.dialect.check_working(engine.pool, server, 5.0)
        ones[0].check = 500, {"error": {"message": "Executor failed.", "code": 500}}
        with pytest.raises(ServerFailedError, match="Executor failed"):
            await engine.dialect.check_working(engine.pool, server, 5.0)

    run(scenario)


def test_a_setting_that_it_does_not_have_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_prefill_delay.cache_clear()
    plain = ServerOptions(tmp_path, tmp_path)
    assert VLLMDialect().adapted(plain) == Setting()
    assert not caplog.messages
    for name in ("server-0", "server-1", "server-1"):
        assert VLLMDialect().adapted(replace(plain, name=name, prefill_delay_ms=100.0)) == Setting()
    assert caplog.messages == ["vLLM cannot hold prompts back: servers.prefill_delay_ms does nothing"]
    assert caplog.records[0].levelno == logging.WARNING
