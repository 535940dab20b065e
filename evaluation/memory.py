"""The structured memory's agent in an evaluation: a text is read once, and its questions asked of what was kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluation.config import EvalConfig
from evaluation.reader import Reader as Answering
from trainer.agents.base import RolloutOptions
from trainer.agents.memalpha import MemAlpha, PreparedText
from trainer.agents.memory import Memory
from trainer.assets import cache_root
from trainer.config_agents import MemalphaAgentConfig
from trainer.config_choice import as_class
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.judge.reader import Reader, RuleReader, Unanswered
from trainer.judge.served import addresses, connect
from trainer.rewards.sources import needs_judge
from trainer.seeding import derive_seed
from trainer.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the text that it is about (shared by all questions about it)."""

    task: Task
    text: PreparedText


class StructuredMemory:
    """Way to answer: the agent reads, the reader answers from its memory. See `evaluation.reader.Reader`."""

    def __init__(self, config: EvalConfig, tokenizer: Any, window: int) -> None:
        self.agent = MemAlpha(as_class(MemalphaAgentConfig, config.agent), tokenizer)
        self.agent.check_window(window)
        self.tokenizer, self.seed = tokenizer, config.seed
        self.reader = _reader(config)
        self._read: dict[tuple[str, float], asyncio.Future[Trajectory]] = {}

    def prepare(self, tasks: Sequence[Task]) -> list[Asked]:
        """See `Reader`. Raises UserError for a suite that is not about memories."""
        texts: dict[str, PreparedText] = {}
        for task in tasks:
            instance = str(task.meta.get("instance", ""))
            if not instance:
                raise UserError(
                    "agent.name=memalpha does not know the question while it reads, and this data set has one question "
                    "for each document: use --data-names memalpha or facts, or --set agent.name=memagent"
                )
            if instance not in texts:
                texts[instance] = self.agent.prepare(replace(task, id=instance))
        return [Asked(task, texts[str(task.meta["instance"])]) for task in tasks]

    def first_prompt(self, prepared: Asked) -> str:
        """See `Reader`."""
        return str(self.tokenizer.decode(self.agent.prompts.fill(Memory(), prepared.text.chunks[0]).ids))

    async def answer(self, prepared: Asked, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `Reader`; several questions about a text wait for one reading of it."""
        read = await self._reading(prepared.text, engine, options)
        memory = read.details["memory"]
        task, source = prepared.task, str(prepared.task.meta.get("source", ""))
        text = await self.reader.answer(task.question, memory)
        details = {"agrees": await _agrees(self.reader, task, text)} if needs_judge(source) else {}
        tokens = read.details["turns"][-1]["memory_tokens"]
        counters = {**read.counters, "memory_tokens": tokens}
        return Trajectory(task.id, read.turns, 0.0, answer_text=text, counters=counters, details=details)

    async def _reading(self, text: PreparedText, engine: Engine, options: RolloutOptions) -> Trajectory:
        key = (text.task.id, options.temperature)
        if key not in self._read:
            # Seeds belong to the text, not to whichever of its questions comes first.
            seeds = RolloutOptions(options.temperature, lambda turn: derive_seed("memory", self.seed, key[0], turn))
            self._read[key] = asyncio.ensure_future(self.agent.rollout(text, engine, seeds))
        try:
            return await asyncio.shield(self._read[key])
        except BaseException:
            if self._read[key].done():
                self._read.pop(key)  # a reading that failed is tried again for the next question
            raise


class Judged:
    """Another way to answer, of a source whose rule is a judge's word: the judge is asked about every answer."""

    def __init__(self, inner: Answering, config: EvalConfig) -> None:
        self.inner = inner
        self.tokenizer = getattr(inner, "tokenizer", None)
        self.reader = _reader(config)
        self._tasks: dict[str, Task] = {}

    def prepare(self, tasks: Sequence[Task]) -> list[Any]:
        """See `Reader`."""
        self._tasks = {task.id: task for task in tasks}
        return self.inner.prepare(tasks)

    def first_prompt(self, prepared: Any) -> str:
        """See `Reader`."""
        return self.inner.first_prompt(prepared)

    async def answer(self, prepared: Any, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `Reader`."""
        trajectory = await self.inner.answer(prepared, engine, options)
        agrees = await _agrees(self.reader, self._tasks[trajectory.task_id], trajectory.answer_text)
        return replace(trajectory, details={**trajectory.details, "agrees": agrees})


async def _agrees(reader: Reader, task: Task, text: str) -> bool | None:
    """Whether the judge finds an answer right; None where it cannot be asked that."""
    try:
        return await reader.agrees(task.question, " ; ".join(task.answers), text)
    except Unanswered:
        return None


def _reader(config: EvalConfig) -> Reader:
    if config.judge.reader == "rules":
        return RuleReader()
    urls = addresses(config.judge.url)
    if not urls:
        raise UserError(
            "a structured memory needs a reader that answers from it, and data of dialogues a judge of the answers: "
            "start one with `clusterkit serve judge` for the run, or name a server with --set judge.url=http://HOST:PORT"
        )
    return connect(config.judge, urls, lambda: urls, Path(cache_root(config.cache_dir)))
