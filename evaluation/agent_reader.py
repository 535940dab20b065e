"""The memory agent as a way to answer: of the whole document, of text that was found in it, or with a blank memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evaluation.config import EvalConfig, Method
from evaluation.reader import TooLong, prepared
from trainer.agents.base import RolloutOptions
from trainer.agents.memagent import MemAgent, PreparedTask
from trainer.agents.template import encode
from trainer.agents.ways import Find, found_text, in_one_section
from trainer.config_agents import MemagentConfig
from trainer.config_choice import as_class
from trainer.engines.base import Engine
from trainer.types import Task, Trajectory


class AgentReader:
    """Way to answer; see `evaluation.reader.Reader`.

    Args:
        window: most tokens of prompt plus response.
        method: name of the way; long_context: the text is read at once, as much of its beginning and end as the window
            allows.
        find: what of the document is read; None: all of it. Where it finds nothing, the answer is given from the memory
            before the first section. That is also what a reading leaves whose memory is blanked after every section
            (`RolloutOptions.blank_memory`): each turn is a conversation of its own, so nothing else reaches the answer.
    """

    def __init__(
        self,
        config: EvalConfig,
        tokenizer: Any,
        window: int,
        method: Method = "memagent",
        find: Find | None = None,
    ) -> None:
        self.tokenizer, self.method, self.find = tokenizer, method, find
        self.agent = MemAgent(as_class(MemagentConfig, config.agent), tokenizer)
        if method == "long_context":
            self.agent = in_one_section(self.agent, window)
        self.agent.check_window(window)

    def prepare(self, tasks: Sequence[Task]) -> list[PreparedTask | TooLong]:
        """See `Reader`."""
        return prepared(lambda task: self.agent.prepare(self._fitting(self._found(task))), tasks)

    def _found(self, task: Task) -> Task:
        return task if self.find is None else found_text(task, self.method, self.find)

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
