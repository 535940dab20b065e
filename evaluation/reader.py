"""The protocol of a way from a question, and its document, to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trainer.agents.base import RolloutOptions
from trainer.engines.base import Engine
from trainer.types import Task, Trajectory


class Reader(Protocol):
    """A way to answer; `prepare` raises UserError for a task that does not fit."""

    def prepare(self, tasks: Sequence[Task]) -> list[Any]:
        """What `answer` takes, for every task: limits checked, token ids made once per question."""

    def first_prompt(self, prepared: Any) -> str:
        """The first prompt that the model is sent, as text."""

    async def answer(self, prepared: Any, engine: Engine, options: RolloutOptions) -> Trajectory:
        """One trajectory."""
