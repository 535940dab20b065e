"""The memory agent as a way to answer: of the whole document, of text that was found in it, or with a blank memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from evaluation.config import EvalConfig
from evaluation.reader import TooLong, prepared
from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent, PreparedTask
from trainer.agents.template import encode
from trainer.config_agents import MemagentConfig
from trainer.config_choice import as_class
from trainer.engines.base import Engine
from trainer.types import Task, Trajectory


class AgentReader:
    """Way to answer; see `evaluation.reader.Reader`.

    Args:
        window: most tokens of prompt plus response.
        find: what of the document is read; None: all of it. Where it finds nothing, the answer is given from the memory
            before the first section. That is also what a reading leaves whose memory is blanked after every section
            (`RolloutOptions.blank_memory`): each turn is a conversation of its own, so nothing else reaches the answer.
        one_section: read the text at once, as much of its beginning and end as the window allows.
    """

    def __init__(
        self,
        config: EvalConfig,
        tokenizer: Any,
        window: int,
        find: Callable[[Task], list[str]] | None = None,
        *,
        one_section: bool = False,
    ) -> None:
        self.tokenizer, self.find = tokenizer, find
        self.agent = MemAgent(as_class(MemagentConfig, config.agent), tokenizer)
        if one_section:
            # Room beside the longest question and memory; a window that lacks it is refused below.
            room = max(window - self.agent.longest_conversation(0), 1)
            limits = {"chunk_tokens": room, "max_chunks": 1, "overflow": "center"}
            self.agent = MemAgent(self.agent.config.model_copy(update=limits), tokenizer)
        self.agent.check_window(window)

    def prepare(self, tasks: Sequence[Task]) -> list[PreparedTask | TooLong]:
        """See `Reader`."""
        return prepared(lambda task: self.agent.prepare(self._fitting(self._found(task))), tasks)

    def _found(self, task: Task) -> Task:
        if self.find is None:
            return task
        return replace(task, chunks=(), context="\n\n".join(self.find(task)))

    def _fitting(self, task: Task) -> Task:
        """A text whose chunks were made for another agent is cut anew where one of them is too long."""
        if "instance" not in task.meta:
            return task
        limit = self.agent.config.chunk_tokens
        long = any(len(encode(self.tokenizer, chunk)) > limit for chunk in task.chunks)
        return replace(task, chunks=(), context="\n\n".join(task.chunks)) if long else task

    def first_prompt(self, prepared: PreparedTask) -> str:
        """See `Reader`."""
        prompts = self.agent.prompts
        values = {"problem": prepared.question, "memory": prompts.no_memory}
        if not prepared.chunks:
            return str(self.tokenizer.decode(prompts.final.fill(values)))
        return str(self.tokenizer.decode(prompts.update.fill({**values, "section": prepared.chunks[0]})))

    async def answer(self, prepared: PreparedTask, engine: Engine, options: RolloutOptions) -> Trajectory:
        """See `Reader`."""
        trajectory = await self.agent.rollout(prepared, engine, options)
        if "instance" in prepared.task.meta:
            counters = {**trajectory.counters, "memory_tokens": _memory_tokens(trajectory)}
            trajectory = replace(trajectory, counters=counters)
        return trajectory


def _memory_tokens(trajectory: Trajectory) -> int:
    """Length of the text that the answer was given from."""
    written = [turn.completion for turn in trajectory.turns if turn.kind == "update"]
    return len(written[-1].token_ids) - (written[-1].finish_reason == "stop") if written else 0
