"""Entries of a memory are judged while the agent reads on: the real agent, controller and reward, a waiting reader."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from builders import ScriptedEngine, byte_tokenizer

from trainer.agents.memalpha import MemAlpha
from trainer.config_agents import MemalphaAgentConfig
from trainer.config_rewards import MemalphaRewardConfig
from trainer.engines.base import EngineError
from trainer.judge.reader import RuleReader
from trainer.rewards.memalpha import MemAlphaReward
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.types import Completion, Group, SamplingParams, Task

CHUNKS = ("Ada paints .", "Rain fell .", "Bo sings .")
SECONDS = 20.0


class Reader(RuleReader):
    """Says which entries it was asked about. held: whether its verdicts never come."""

    def __init__(self, held: bool = False) -> None:
        self.asked: list[str] = []
        self.given_up: list[str] = []
        self.news = asyncio.Condition()
        self.held = held

    async def worth_keeping(self, store: str, content: str, chunk: str) -> bool:
        async with self.news:
            self.asked.append(content)
            self.news.notify_all()
        try:
            if self.held:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(content)
            raise
        return await super().worth_keeping(store, content, chunk)

    async def until_asked(self, count: int) -> None:
        """Return when so many verdicts were asked for."""
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(lambda: len(self.asked) >= count), SECONDS)


class ReadsOn(ScriptedEngine):
    """Answers turn n when the entries of all n turns before it are being judged; fails in turn `breaks`."""

    def __init__(self, reader: Reader, tokenizer: Any, breaks: int = 99) -> None:
        stop = tokenizer.eos_token_id
        super().__init__([[*tokenizer(insert(text))["input_ids"], stop] for text in CHUNKS], stop)
        self.reader, self.breaks, self.turn = reader, breaks, 0

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        await self.reader.until_asked(self.turn)
        self.turn += 1
        if self.turn > self.breaks:
            raise EngineError("gone")
        return await super().generate(prompt_ids, params, key=key)


def insert(content: str) -> str:
    call = {"name": "new_memory_insert", "arguments": {"memory_type": "semantic", "content": content}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def read(reader: Reader, breaks: int = 99) -> Group:
    tokenizer = byte_tokenizer()
    settings = {"name": "memalpha", "chunk_tokens": 200, "max_memory_tokens": 300, "context_tokens": 6000}
    agent = MemAlpha(MemalphaAgentConfig.model_validate(settings), tokenizer)
    reward = MemAlphaReward(MemalphaRewardConfig(beta=0.05, gamma=0.1), reader)
    controller = RolloutController(agent, ReadsOn(reader, tokenizer, breaks), 1, reward=reward)
    task = Task("t", "Ada", ("paints",), chunks=CHUNKS, meta={"source": "facts"})

    async def one_group() -> Group:
        group = await controller.group(task, controller.agent.prepare(task), SamplingPlan("p", 1))
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), SECONDS)  # what was given up ends
        return group

    return asyncio.run(one_group())


def test_entries_are_judged_while_the_agent_reads_on_and_each_of_them_once() -> None:
    reader = Reader()
    (trajectory,) = read(reader).trajectories

    assert reader.asked == list(CHUNKS)
    assert trajectory.error is None
    assert trajectory.metrics["r4"] == 1.0
    assert trajectory.metrics["r1"] == 1.0
    assert [call["valid"] for turn in trajectory.details["turns"] for call in turn["calls"]] == [True] * 3
    assert trajectory.begun is None


def test_a_trajectory_that_fails_takes_its_verdicts_along() -> None:
    reader = Reader(held=True)
    (trajectory,) = read(reader, breaks=2).trajectories

    assert trajectory.error == "EngineError: gone"
    assert reader.given_up == reader.asked == list(CHUNKS[:2])
