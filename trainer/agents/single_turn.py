"""One prompt, one response: what AReaL trains on mathematical problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.agents.base import RolloutOptions, TurnSampler
from trainer.agents.template import encode, prompt_text, within
from trainer.config_agents import QuestionAgentConfig
from trainer.engines.base import Engine
from trainer.errors import QuestionTooLongError
from trainer.types import Task, Trajectory

MARK_TOKENS = 128
"""An upper bound of what a chat template adds to a question."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """A task and its prompt's token ids."""

    task: Task
    ids: list[int]


class SingleTurn:
    """Sends the question as a user's message in the model's chat template; a prompt with its marks goes as it is."""

    builtin = True

    def __init__(self, config: QuestionAgentConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        # Marks such as <|im_start|>; single characters and blanks may well stand in a question.
        self._marks = tuple(mark for mark in tokenizer.added_tokens_encoder if len(mark.strip()) > 2)

    def longest_conversation(self) -> int:
        """Tokens of the longest prompt plus response."""
        return self.config.max_question_tokens + self.config.max_final_tokens

    def prepare(self, task: Task) -> Prompted:
        """Tokenise the prompt. Raises QuestionTooLongError when it is over agent.max_question_tokens."""
        ids = self._ids(task.question)
        limit = self.config.max_question_tokens
        if len(ids) > limit:
            raise QuestionTooLongError(
                f"task {task.id}: the prompt has {len(ids)} tokens and agent.max_question_tokens is {limit}: raise it"
            )
        return Prompted(task, ids)

    def fits(self, tasks: Sequence[Task]) -> list[bool]:
        """Whether each prompt is within agent.max_question_tokens."""
        limit, questions = self.config.max_question_tokens, [task.question for task in tasks]
        # Short ones need no template; see `within`.
        fits = [question.isascii() and len(question) + MARK_TOKENS <= limit for question in questions]
        for whole in (True, False):
            numbers = [n for n, q in enumerate(questions) if not fits[n] and self._is_whole(q) == whole]
            texts = [questions[n] if whole else self._text(questions[n]) for n in numbers]
            for n, fit in zip(numbers, within(self.tokenizer, texts, limit, special=whole), strict=True):
                fits[n] = fit
        return fits

    def _ids(self, question: str) -> list[int]:
        if self._is_whole(question):
            # As AReaL does it: the tokenizer puts its own first token before a whole prompt, where it has one.
            return list(self.tokenizer(question)["input_ids"])
        return encode(self.tokenizer, self._text(question))

    def _is_whole(self, question: str) -> bool:
        """Whether a question has the chat template's marks already."""
        return any(mark in question for mark in self._marks)

    def _text(self, question: str) -> str:
        lacks = "the model's tokenizer has no chat template and the prompts are none by themselves"
        return prompt_text(self.tokenizer, question, self.config, lacks)

    async def rollout(self, prepared: Prompted, engine: Engine, options: RolloutOptions) -> Trajectory:
        """Sample one response."""
        sampler = TurnSampler(engine, options, self.config, prepared.task)
        ids = await sampler.sample("final", prepared.ids)
        return sampler.trajectory(self.tokenizer.decode(ids, skip_special_tokens=True))
