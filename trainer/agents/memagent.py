"""The memory agent (MemAgent, arXiv 2507.02259): read a document chunk by chunk, overwrite a memory, then answer.

    memory = "No previous memory"
    for chunk in document:   memory = model(problem, memory, chunk)      one independent conversation each
    answer = model(problem, memory)                                      with the answer in \\boxed{}

Every conversation is its own training row. Deviations from the released code are explicit options (empty memory,
overflow) and everything out of the ordinary is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.agents.base import RolloutOptions, SectionRead, TurnSampler, limit_chunks, split_chunks
from trainer.agents.template import Prompts, encode, make_prompts, within
from trainer.config_agents import OverwritingAgentConfig
from trainer.engines.base import Engine
from trainer.errors import QuestionTooLongError, UserError
from trainer.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task as token ids; made once and shared by the trajectories of its group. first: prompt of the first chunk."""

    task: Task
    question: list[int]
    chunks: list[list[int]]
    dropped_tokens: int
    first: list[int]


class MemAgent:
    """Agent of one tokenizer, one wording and one set of limits; it holds no state between tasks."""

    builtin = True

    def __init__(self, config: OverwritingAgentConfig, tokenizer: Any) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prompts: Prompts = make_prompts(tokenizer, config)

    def longest_conversation(self, chunk_tokens: int | None = None) -> int:
        """Tokens of the longest conversation that the limits allow, prompt plus response.

        chunk_tokens: in place of the configured limit.
        """
        c = self.config
        chunk = c.chunk_tokens if chunk_tokens is None else chunk_tokens
        memory = max(c.max_memory_tokens, len(self.prompts.no_memory))
        filled = {"problem": c.max_question_tokens, "memory": memory, "section": chunk}
        update = self.prompts.update.length(filled) + c.max_memory_tokens
        final = self.prompts.final.length(filled) + c.max_final_tokens
        return max(update, final)

    def check_window(self, window: int, max_tokens_per_mb: int = 0) -> None:  # noqa: ARG002 (longer ones are trained on)
        """See `agents.base.check_window`."""
        longest, c = self.longest_conversation(), self.config
        if longest > window:
            fits, question = c.chunk_tokens - (longest - window), c.question_limit("update")
            helps = fits > 0 and self.longest_conversation(fits) <= window
            raise UserError(
                f"the longest conversation has {longest} tokens (chunk {c.chunk_tokens}, memory {c.max_memory_tokens} "
                f"read and {c.max_memory_tokens} written, question {question}, the prompt's own words), "
                f"over the model's context window of {window}: lower "
                + (f"agent.chunk_tokens to {fits} or less, or another limit" if helps else "several of these limits")
            )

    def prepare(self, task: Task) -> PreparedTask:
        """Tokenise question and document and cut the document into chunks.

        Raises:
            QuestionTooLongError: the question is over its limit.
            UserError: a chunk that the task cut itself is; or the document has more chunks than `max_chunks` and
                `overflow` is "error".
        """
        c = self.config
        question = encode(self.tokenizer, task.question)
        if len(question) > c.max_question_tokens:
            raise QuestionTooLongError(
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
        first = self.update_prompt(question, self.prompts.no_memory, kept[0]) if kept else []
        return PreparedTask(task, question, kept, dropped, first)

    def fits(self, tasks: Sequence[Task]) -> list[bool]:
        """Whether each question is within agent.max_question_tokens."""
        return within(self.tokenizer, [task.question for task in tasks], self.config.max_question_tokens)

    def _limit(self, task: Task, chunks: list[list[int]]) -> tuple[list[list[int]], int]:
        """At most `max_chunks` chunks: the first and last halves of the document's ids."""
        kept, dropped = limit_chunks(task, chunks, self.config)
        if not dropped or task.chunks:
            return kept, dropped
        # A document that we cut is cut anew, so that a short last chunk costs no room.
        ids = [i for chunk in chunks for i in chunk]
        budget = self.config.max_chunks * self.config.chunk_tokens
        head = budget // 2
        ends = ids[:head] + ids[len(ids) - (budget - head) :]
        return split_chunks(ends, self.config.chunk_tokens), len(ids) - budget

    async def rollout(self, prepared: PreparedTask, engine: Engine, options: RolloutOptions) -> Trajectory:
        """Read the whole document and answer."""
        sampler = TurnSampler(engine, options, self.config, prepared.task)
        if prepared.dropped_tokens:
            sampler.counters["truncated_context"] += 1
        memory = no_memory = self.prompts.no_memory
        self._announce(prepared, 0, engine)
        for number, chunk in enumerate(prepared.chunks):
            self._announce(prepared, number + 1, engine)
            prompt = self.update_prompt(prepared.question, memory, chunk) if number else prepared.first
            written = await self.update(sampler, prompt, memory)
            memory = no_memory if options.blank_memory else written
        answer = await self.answer(sampler, prepared.question, memory)
        return sampler.trajectory(self.tokenizer.decode(answer, skip_special_tokens=True))

    def update_prompt(self, question: list[int], memory: list[int], chunk: list[int]) -> list[int]:
        """Token ids that have a chunk read."""
        return self.prompts.update.fill({"problem": question, "memory": memory, "section": chunk})

    async def update(self, sampler: TurnSampler, prompt: list[int], memory: list[int]) -> list[int]:
        """Have a chunk read; returns the memory after it. memory: the one before. All are token ids."""
        if written := await sampler.sample("update", prompt):
            return written
        sampler.counters["empty_memory"] += 1
        return memory if self.config.empty_memory == "keep" else []

    async def answer(self, sampler: TurnSampler, question: list[int], memory: list[int]) -> list[int]:
        """Answer from the memory; returns the response's token ids without the end token."""
        return await sampler.sample("final", self.prompts.final.fill({"problem": question, "memory": memory}))

    def sections_read(self, task: Task, trajectory: Trajectory) -> list[SectionRead]:
        """Return the text of every section, and the memory that a trajectory had after it."""
        updates = iter([turn for turn in trajectory.turns if turn.kind == "update"])
        memory = self.prompts.no_memory
        found = []
        for chunk in self.prepare(task).chunks:
            text, turn = self._text(chunk), next(updates, None)
            if turn is not None:
                written = turn.completion.text_ids
                memory = written if written or self.config.empty_memory != "keep" else memory
            found.append(SectionRead(text, None if turn is None else self._text(memory)))
        return found

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _announce(self, prepared: PreparedTask, number: int, engine: Engine) -> None:
        """Tell the engine how the prompts about a chunk begin, where the memory comes behind the chunk."""
        template = self.prompts.update
        if number < len(prepared.chunks) and template.stands_before("section", "memory"):
            known = {"problem": prepared.question, "section": prepared.chunks[number]}
            engine.prefetch(template.beginning(known), key=prepared.task.key)
