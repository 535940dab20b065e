"""The protocol of a way from a question, and its document, to an answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.agents.base import RolloutOptions
from trainer.engines.base import Engine
from trainer.errors import QuestionTooLongError
from trainer.types import Task, Trajectory


@dataclass(frozen=True, slots=True)
class TooLong:
    """In place of a question that is too long for a way to answer: it counts as asked and wrong."""

    reason: str


def prepared(prepare: Callable[[Task], Any], tasks: Sequence[Task]) -> list[Any]:
    """What `prepare` makes of each task, on several cores; `TooLong` where its question is.

    prepare: is called from several threads at a time.
    """

    def one(task: Task) -> Any:
        try:
            return prepare(task)
        except QuestionTooLongError as error:
            return TooLong(str(error))

    # Tokenizers leave the interpreter to others; more threads than cores would only take memory.
    with ThreadPoolExecutor(os.cpu_count(), "prepare") as pool:
        return list(pool.map(one, tasks))


class Reader(Protocol):
    """A way to answer; `prepare` raises UserError for a task that does not fit for another reason than its question."""

    def prepare(self, tasks: Sequence[Task]) -> list[Any]:
        """What `answer` takes, for every task: limits checked, token ids made once per question; or `TooLong`."""

    def first_prompt(self, prepared: Any) -> str:
        """The first prompt that the model is sent, as text."""

    async def answer(self, prepared: Any, engine: Engine, options: RolloutOptions) -> Trajectory:
        """One trajectory."""
