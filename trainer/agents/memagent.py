"""The memory agent (MemAgent, arXiv 2507.02259): read a document chunk by chunk, overwrite a memory, then answer.

    memory = "No previous memory"
    for chunk in document:   memory = model(problem, memory, chunk)      one independent conversation each
    answer = model(problem, memory)                                      with the answer in \\boxed{}

Every conversation is its own training row. Deviations from the released code are explicit options (empty memory,
overflow) and everything out of the ordinary is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trainer.agents.template import Prompts, encode, make_prompts
from trainer.config_agents import OverwritingAgentConfig
from trainer.engines.base import Engine
from trainer.errors import UserError
from trainer.types import SamplingParams, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """How one trajectory is sampled.

    temperature: 0 is greedy. seed_of_turn: turn number -> seed of its response. blank_memory: the ablation that resets
    the memory after every chunk. banned_final_ids: tokens that the final answer may not hold (forces an answer).
    turn_read: told of every turn that has ended, as `details` is going to have it, by agents that keep such a record.
    """

    temperature: float
    seed_of_turn: Callable[[int], int]
    blank_memory: bool = False
    banned_final_ids: tuple[int, ...] = ()
    turn_read: Callable[[dict[str, Any]], None] = lambda _turn: None


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task as token ids; made once and shared by the trajectories of its group."""

    task: Task
    question: list[int]
    chunks: list[list[int]]
    dropped_tokens: int


def split_chunks(ids: list[int], chunk_tokens: int) -> list[list[int]]:
    """Cut ids into runs of `chunk_tokens`; the last may be shorter, none is empty (no ids: no chunk)."""
    return [ids[i : i + chunk_tokens] for i in range(0, len(ids), chunk_tokens)]


class MemAgent:
    """Agent of one tokenizer, one wording and one set of limits; it holds no state between tasks."""

    builtin = True

    def __init__(self, config: OverwritingAgentConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prompts: Prompts = make_prompts(tokenizer, config)

    def longest_conversation(self, chunk_tokens: int | None = None) -> int:
        """Tokens of the longest conversation that the limits allow: prompt plus response.

        chunk_tokens: instead of the configured limit.
        """
        c = self.config
        chunk = c.chunk_tokens if chunk_tokens is None else chunk_tokens
        memory = max(c.max_memory_tokens, len(self.prompts.no_memory))
        update = self.prompts.update.num_fixed + c.max_question_tokens + memory + chunk + c.max_memory_tokens
        final = self.prompts.final.num_fixed + c.max_question_tokens + memory + c.max_final_tokens
        return max(update, final)

    def check_window(self, window: int, max_tokens_per_mb: int = 0) -> None:
        """See `agents.base.check_window`."""
        longest, c = self.longest_conversation(), self.config
        if longest > window:
            fits = c.chunk_tokens - (longest - window)
            helps = fits > 0 and self.longest_conversation(fits) <= window
            raise UserError(
                f"the longest conversation has {longest} tokens (chunk {c.chunk_tokens}, memory {c.max_memory_tokens} "
                f"read and {c.max_memory_tokens} written, question {c.max_question_tokens}, the prompt's own words), "
                f"over the model's context window of {window}: lower "
                + (f"agent.chunk_tokens to {fits} or less, or another limit" if helps else "several of these limits")
            )
        if max_tokens_per_mb and longest > max_tokens_per_mb:
            raise UserError(
                f"the longest conversation has {longest} tokens and train.max_tokens_per_mb is {max_tokens_per_mb}: "
                "raise it to at least that, or lower agent.chunk_tokens or another limit"
            )

    def prepare(self, task: Task) -> PreparedTask:
        """Tokenise question and document and cut the document into chunks.

        Raises:
            UserError: the question, or a chunk that the task cut itself, is over its limit; or the document has more
                chunks than `max_chunks` and `overflow` is "error".

        """
        c = self.config
        question = encode(self.tokenizer, task.question)
        if len(question) > c.max_question_tokens:
            raise UserError(
                f"task {task.id}: the question has {len(question)} tokens and agent.max_question_tokens is "
                f"{c.max_question_tokens}: raise it"
            )
        if task.chunks:
            chunks = [encode(self.tokenizer, text) for text in task.chunks]
            if (longest := max(map(len, chunks))) > c.chunk_tokens:
                raise UserError(
                    f"task {task.id}: a chunk has {longest} tokens and agent.chunk_tokens is {c.chunk_tokens}: raise it"
                )
        else:
            chunks = split_chunks(encode(self.tokenizer, task.context), c.chunk_tokens)
        kept, dropped = self._limit(task, chunks)
        return PreparedTask(task, question, kept, dropped)

    def _limit(self, task: Task, chunks: list[list[int]]) -> tuple[list[list[int]], int]:
        """At most `max_chunks` chunks: the first and last halves of the document's ids."""
        c = self.config
        if not c.max_chunks or len(chunks) <= c.max_chunks:
            return chunks, 0
        if c.overflow == "error":
            raise UserError(
                f"task {task.id}: the document has {len(chunks)} chunks and agent.max_chunks is {c.max_chunks}: raise "
                "it, or set agent.overflow=center to read the first and last halves only"
            )
        if task.chunks:
            head = c.max_chunks // 2
            kept = chunks[:head] + chunks[len(chunks) - (c.max_chunks - head) :]
            return kept, sum(map(len, chunks)) - sum(map(len, kept))
        ids = [i for chunk in chunks for i in chunk]
        budget = c.max_chunks * c.chunk_tokens
        head = budget // 2
        return split_chunks(ids[:head] + ids[len(ids) - (budget - head) :], c.chunk_tokens), len(ids) - budget

    async def rollout(self, prepared: PreparedTask, engine: Engine, options: RolloutOptions) -> Trajectory:
        """Read the whole document and answer. The reward is left at 0: rewards are not the agent's business."""
        counters: Counter[str] = Counter()
        if prepared.dropped_tokens:
            counters["truncated_context"] += 1
        turns: list[Turn] = []

        async def converse(kind: Literal["update", "final"], prompt_ids: list[int]) -> list[int]:
            final = kind == "final"
            params = SamplingParams(
                max_new_tokens=self.config.max_final_tokens if final else self.config.max_memory_tokens,
                temperature=options.temperature,
                seed=options.seed_of_turn(len(turns)),
                banned_token_ids=options.banned_final_ids if final else (),
            )
            completion = await engine.generate(prompt_ids, params, key=prepared.task.id)
            turns.append(Turn(kind, prompt_ids, completion))
            if completion.finish_reason == "length":
                counters["truncated_final" if final else "truncated_memory"] += 1
                return completion.token_ids
            return completion.token_ids[:-1]  # the end token is trained on but is not part of the memory

        no_memory = self.prompts.no_memory
        memory = no_memory
        for chunk in prepared.chunks:
            values = {"problem": prepared.question, "memory": memory, "section": chunk}
            written = await converse("update", self.prompts.update.fill(values))
            if not written:
                counters["empty_memory"] += 1
                written = memory if self.config.empty_memory == "keep" else []
            memory = no_memory if options.blank_memory else written
        answer = await converse("final", self.prompts.final.fill({"problem": prepared.question, "memory": memory}))
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return Trajectory(prepared.task.id, turns, reward=0.0, answer_text=text, counters=dict(counters))
