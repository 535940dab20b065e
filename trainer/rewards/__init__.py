"""Rewards and metrics: text of a final answer plus gold answers in, numbers out."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from trainer import custom
from trainer.config import RunConfig
from trainer.rewards.boxed import boxed_reward
from trainer.types import Task, Trajectory


class Reward(Protocol):
    """What the rollout controller needs of a reward; one of the user's own is made from (RewardConfig)."""

    def score(self, task: Task, trajectory: Trajectory) -> float | Awaitable[float]:
        """The trajectory's reward; `async def` where it has to wait for something."""
        ...


class Boxed:
    r"""1.0 where the content of the last \boxed{} is a gold answer, else 0.0."""

    def score(self, task: Task, trajectory: Trajectory) -> float:
        """See `trainer.rewards.boxed`."""
        return boxed_reward(trajectory.answer_text, task.answers)


def make_reward(config: RunConfig) -> Reward:
    """The reward that a configuration names. Raises UserError for one that cannot be made."""
    if custom.is_custom(config.reward.name):
        reward: Reward = custom.make("reward.name", config.reward.name, config.code_dir, config.reward)
        return reward
    return Boxed()
