"""Mem-alpha (Wang et al. 2025): read a text chunk by chunk, and keep a structured memory by calling tools.

    memory = core text, semantic entries, episodic entries
    for chunk in text:   calls = model(memory, chunk);   memory = calls carried out in order
    questions are answered from the memory alone, by a frozen model: that is the reward's business

Every chunk is one conversation and one training row, with the ids that were sent and sampled. A call that cannot be
carried out is answered and counted, never an error of the run.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from trainer.agents.base import RolloutOptions, SectionRead, TurnSampler, limit_chunks, split_chunks
from trainer.agents.memalpha_prompt import MemoryPrompts, encode_plain
from trainer.agents.memory import Memory
from trainer.agents.tool_calls import parse_calls
from trainer.config_agents import StoresAgentConfig
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.types import Task, Trajectory

log = logging.getLogger(__name__)

EXCERPT = 400
"""Characters of a chunk that go into the record."""


@dataclass(frozen=True, slots=True)
class PreparedText:
    """A task as token ids.

    chunks: what is read turn by turn.
    split: the task's own chunks that were longer than agent.chunk_tokens and were cut.
    dropped_tokens: tokens that max_chunks leaves out.
    """

    task: Task
    chunks: list[list[int]]
    split: int
    dropped_tokens: int


class MemAlpha:
    """Agent of one tokenizer, one wording and one set of limits; it holds no state between tasks."""

    builtin = True

    def __init__(self, config: StoresAgentConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        self._said_shrunk = False
        self.prompts = MemoryPrompts(config, tokenizer)

    def longest_conversation(self) -> int:
        """Tokens of the longest prompt with its response: the context that prompts shrink to."""
        return self.config.context_tokens

    def prepare(self, task: Task) -> PreparedText:
        """Tokenise the text; a chunk over `chunk_tokens` is read in several turns, and said so.

        Raises:
            UserError: there is nothing to read, or more chunks than `max_chunks` with overflow=error.
        """
        c = self.config
        texts = task.chunks or (task.context,)
        pieces, split = [], 0
        for text in texts:
            cut = split_chunks(encode_plain(self.tokenizer, text), c.chunk_tokens)
            split += len(cut) > 1 and bool(task.chunks)
            pieces += cut
        if not pieces:
            raise UserError(f"task {task.id} has no text to read: remove it from the data")
        if split:
            log.warning(
                "task %s: %d chunks have more than agent.chunk_tokens=%d tokens and are read in several turns",
                task.id, split, c.chunk_tokens,
            )  # fmt: skip
        kept, dropped = limit_chunks(task, pieces, c)
        return PreparedText(task, kept, split, dropped)

    async def rollout(self, prepared: PreparedText, engine: Engine, options: RolloutOptions) -> Trajectory:
        """Read the whole text; `details` of the trajectory holds the memory and what every call did."""
        sampler = TurnSampler(engine, options, self.config, prepared.task)
        counters, told = sampler.counters, list[dict[str, Any]]()
        if prepared.dropped_tokens:
            counters["truncated_context"] += 1
        if prepared.split:
            counters["split_chunks"] += prepared.split
        memory = Memory(self._cut_core)
        for chunk in prepared.chunks:
            if options.blank_memory:
                memory = Memory(self._cut_core)
            prompt = self.prompts.fill(memory, chunk)
            if prompt.shrunk:
                counters["shrunk_prompts"] += 1
                self._tell_shrunk(prepared.task.id, len(told) + 1)
            written = await sampler.sample("update", prompt.ids)
            response = self.tokenizer.decode(written, skip_special_tokens=True)
            outcomes = [memory.apply(call) for call in parse_calls(response)]
            counters["tool_calls"] += len(outcomes)
            counters["failed_tool_calls"] += sum(not outcome.ok for outcome in outcomes)
            told.append(
                {
                    "chunk": self.tokenizer.decode(chunk[:EXCERPT])[:EXCERPT],
                    "chunk_tokens": len(chunk),
                    "calls": [asdict(outcome) for outcome in outcomes],
                    "memory_tokens": sum(self.count(text) for text in memory.texts()),
                    "shrunk": prompt.shrunk,
                }
            )
            options.turn_read(told[-1])
        return sampler.trajectory(details={"memory": memory.as_dict(), "turns": told})

    def sections_read(self, task: Task, trajectory: Trajectory) -> list[SectionRead]:
        """Return the text of every section, and what a trajectory's memory held after it, an entry a line."""
        turns, memory = iter(trajectory.turns), Memory(self._cut_core)
        found = []
        for chunk in self.prepare(task).chunks:
            text, turn = str(self.tokenizer.decode(chunk)), next(turns, None)
            if turn is not None:
                response = self.tokenizer.decode(turn.completion.text_ids, skip_special_tokens=True)
                for call in parse_calls(response):
                    memory.apply(call)
            found.append(SectionRead(text, None if turn is None else "\n".join(memory.texts())))
        return found

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(encode_plain(self.tokenizer, text))

    def check_window(self, window: int, max_tokens_per_mb: int = 0) -> None:  # noqa: ARG002 (longer ones are trained on)
        """See `agents.base.check_window`."""
        if self.config.context_tokens > window:
            raise UserError(
                f"agent.context_tokens={self.config.context_tokens} is over the model's context window of {window} "
                f"tokens: set agent.context_tokens={window}, and agent.chunk_tokens well below it"
            )

    def _tell_shrunk(self, task_id: str, turn: int) -> None:
        """Say the first time what the counter shrunk_prompts goes on counting."""
        if not self._said_shrunk:
            log.warning(
                "task %s, turn %d: the memory does not fit into agent.context_tokens=%d, so the prompt shows less of "
                "it; further cases are counted as shrunk_prompts",
                task_id, turn, self.config.context_tokens,
            )  # fmt: skip
        self._said_shrunk = True

    def _cut_core(self, text: str) -> str:
        ids = encode_plain(self.tokenizer, text)
        limit = self.config.core_tokens
        return text if len(ids) <= limit else str(self.tokenizer.decode(ids[:limit])).rstrip("\ufffd").strip()
