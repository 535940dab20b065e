"""What every turn of a step is credited with: its trajectory's advantage, or one of its own."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from trainer.algorithms.advantages import gigpo_advantages, group_advantages, turn_advantages
from trainer.algorithms.table import resolve
from trainer.config import RunConfig
from trainer.seeding import derive_seed
from trainer.types import Trajectory


def control_rewards(rewards: list[float], control: str, *seed_parts: str | int) -> list[float]:
    """Rewards as a negative control wants them: permuted over the batch, with the sign turned round, or untouched."""
    if control == "shuffled":
        shuffled = list(rewards)
        random.Random(derive_seed(*seed_parts)).shuffle(shuffled)
        return shuffled
    if control == "flipped":
        return [-r for r in rewards]
    return rewards


def shared_by_turns(trajectories: list[Trajectory], advantages: Tensor, config: RunConfig) -> Tensor:
    """Advantage of every turn, [turns], from that of its trajectory, [trajectories]."""
    return turn_advantages(advantages, _trajectory_of_turn(trajectories), config.algorithm.credit)


def rewarded_turns(trajectories: list[Trajectory], groups: Tensor, config: RunConfig, step: int) -> Tensor:
    """Advantage of every turn, [turns], from the turns' own rewards (Mem-alpha).

    grpo: the turns of all trajectories of a group are one population. gigpo: see `gigpo_advantages`. A control permutes
    or turns round the rewards of the whole batch's turns (gigpo: its outcomes and its turns' parts, each by itself).
    """
    algorithm, control = config.algorithm, config.control
    norm = resolve(algorithm).advantage
    index = _trajectory_of_turn(trajectories)
    rewards = [t.turn_rewards for t in trajectories if t.turn_rewards is not None]
    if control.zero_advantages:
        return torch.zeros(len(index), dtype=torch.float64)

    def controlled(values: list[float], part: str) -> Tensor:
        return torch.tensor(
            control_rewards(values, control.rewards, config.seed, "shuffle", part, step), dtype=torch.float64
        )

    if algorithm.turn_advantage == "gigpo":
        outcomes = controlled([one.outcome for one in rewards], "outcome")
        own = controlled([value for one in rewards for value in one.turns], "turns")
        return gigpo_advantages(outcomes, own, index, groups, norm, algorithm.gigpo_discount, algorithm.gigpo_weight)
    totals = controlled([value for one in rewards for value in one.totals], "totals")
    return group_advantages(totals, groups[index], norm)


def trajectory_means(trajectories: list[Trajectory], per_turn: Tensor) -> Tensor:
    """Mean advantage of the turns of every trajectory, [trajectories]; 0 for one without turns."""
    index = _trajectory_of_turn(trajectories)
    sums = torch.zeros(len(trajectories), dtype=torch.float64).index_add_(0, index, per_turn.double())
    return sums / torch.bincount(index, minlength=len(trajectories)).clamp(min=1)


def _trajectory_of_turn(trajectories: list[Trajectory]) -> Tensor:
    return torch.tensor([i for i, t in enumerate(trajectories) for _ in t.turns], dtype=torch.long)
