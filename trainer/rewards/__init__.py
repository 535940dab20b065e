"""Rewards and metrics: text of a final answer plus gold answers in, numbers out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from trainer.rewards.boxed import boxed_reward
from trainer.rewards.qa import extract_answer, f1
from trainer.types import Task, Trajectory


class Begun(Protocol):
    """What a reward does for one trajectory while the agent still reads; belongs to the trajectory's asyncio task."""

    def turn_read(self, turn: dict[str, Any]) -> None:
        """A turn has ended: `turn` is its entry in the agent's details."""

    def close(self) -> None:
        """The trajectory is scored or given up: end what still runs for it."""


class Reward(Protocol):
    """What the rollout controller needs of a reward; one of the user's own is made from its section.

    A reward that waits for servers may also have `begin()`, which returns a `Begun` for a trajectory that starts;
    `score` finds it in `trajectory.begun`.
    """

    def score(self, task: Task, trajectory: Trajectory) -> float | Awaitable[float]:
        """The trajectory's reward; `async def` where it has to wait for something."""


class Boxed:
    r"""1.0 where the content of the last \boxed{} is a gold answer, else 0.0."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """See `trainer.rewards.boxed`."""
        return boxed_reward(trajectory.answer_text, task.answers)


class SharedWords:
    """SQuAD's F1, 0 to 1, of the marked answer, or of the whole response where none is marked."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """See `trainer.rewards.qa.f1`."""
        text = trajectory.answer_text
        return f1(extract_answer(text) or text, task.answers)


class Found:
    """1.0 where a gold answer stands anywhere in the answer, in letters of either case, else 0.0: RULER's measure."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """See the class; arXiv 2404.06654."""
        text = trajectory.answer_text.lower()
        return float(any(answer.lower() in text for answer in task.answers))


PLAIN: dict[str, Callable[[], Reward]] = {"boxed": Boxed, "f1": SharedWords, "found": Found}
"""Rewards that need no settings, by name."""


def reward_counts(reward: Reward) -> dict[str, float]:
    """What a reward has counted since the last call, for a step's statistics; most rewards count nothing."""
    counts = getattr(reward, "counts", None)
    return dict(counts()) if callable(counts) else {}
