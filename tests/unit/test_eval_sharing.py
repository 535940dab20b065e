"""Several answers to one question: who is asked, and that the prompt is read once."""

from __future__ import annotations

import asyncio
from typing import Any

from builders import byte_tokenizer
from httpstub import Answer, HttpStub

from evaluation.engines import KEYED_TOKENS, Sampling
from evaluation.openai_engine import OpenAIEngine
from trainer.types import Completion, SamplingParams

LONG = [5] * KEYED_TOKENS


class Keys:
    """A fake engine that notes which keys it was given: a server does not say where it was found."""

    version = 0

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.announced: list[str] = []

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        self.asked.append(key)
        return Completion([1], [0.0], "stop", 0)

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        self.announced.append(key)


def test_answers_with_a_long_prompt_go_to_one_server_and_short_ones_to_any() -> None:
    inner = Keys()
    engine = Sampling(inner, 1.0, -1)  # type: ignore[arg-type]

    async def run() -> None:
        for prompt in (LONG, LONG[1:]):
            engine.prefetch(prompt, key="q")
            await engine.generate(prompt, SamplingParams(2), key="q")

    asyncio.run(run())
    assert (inner.asked, inner.announced) == (["q", ""], ["q"])


def test_a_server_with_openais_route_reads_a_prompt_once_before_its_answers() -> None:
    """A stand-in, which is all that this route is: what its cache does is the server's affair."""
    sent: list[dict[str, Any]] = []

    async def answer(_method: str, path: str, body: dict[str, Any]) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        sent.append(body)
        if len(sent) == 1:  # the others come when it is read, or would be here by now
            await asyncio.sleep(0.1)
            assert len(sent) == 1
        return 200, {"choices": [{"text": "x", "finish_reason": "length"}]}

    async def run() -> None:
        async with HttpStub(answer) as stub:
            engine = OpenAIEngine(stub.url, byte_tokenizer())
            await engine.probe()
            prompts = [[*LONG, n] for n in range(4)]
            jobs = [engine.generate(ids, SamplingParams(8, seed=n), key="q") for n, ids in enumerate(prompts)]
            done = await asyncio.gather(*jobs)
            await engine.generate([1, 2, 3], SamplingParams(8), key="other")
            await engine.close()
        assert [one.finish_reason for one in done] == ["length"] * 4

    asyncio.run(run())
    assert [(len(body["prompt"]), body["max_tokens"]) for body in sent] == [
        (len(LONG), 1), *[(len(LONG) + 1, 8)] * 4, (3, 8),
    ]  # fmt: skip
    assert sorted(body["seed"] for body in sent[1:5]) == [0, 1, 2, 3]
