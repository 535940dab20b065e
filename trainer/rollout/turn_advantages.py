"""What every turn of a step is credited with: its trajectory's advantage, or one of its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.algorithms.advantages import gigpo_advantages, group_advantages
from trainer.algorithms.table import overlong_penalty, resolve
from trainer.config import RunConfig
from trainer.config_parts import AlgorithmConfig
from trainer.seeding import derive_seed
from trainer.types import Group, Trajectory, TurnRewards


def control_rewards(rewards: list[float], control: str, *seed_parts: str | int) -> list[float]:
    """Rewards as a negative control wants them: permuted over the batch, with the sign turned round, or untouched."""
    if control == "shuffled":
        shuffled = list(rewards)
        random.Random(derive_seed(*seed_parts)).shuffle(shuffled)
        return shuffled
    if control == "flipped":
        return [-r for r in rewards]
    return rewards


def overlong_penalties(trajectory: Trajectory, config: RunConfig) -> list[float]:
    """What each turn's reward loses by its length, 0 or less.

    Only a response that is rewarded can lose: the last one, or every turn where turns are rewarded apart.
    """
    a = config.algorithm
    factor = a.overlong_penalty * (config.verdicts.reward_scale if config.reward.name == "math" else 1.0)
    found = [0.0] * len(trajectory.turns)
    for number, turn in enumerate(trajectory.turns):
        if trajectory.turn_rewards is None and number < len(trajectory.turns) - 1:
            continue
        limit = config.agent.response_limit(turn.kind)
        length = len(turn.completion.token_ids)
        found[number] = factor * overlong_penalty(length, limit, config.overlong_buffer(limit))
    return found


def rewarded_turns(trajectories: list[Trajectory], groups: Tensor, config: RunConfig, step: int) -> Tensor:
    """Advantage of every turn, [turns], from the turns' own rewards (Mem-alpha).

    grpo: the turns of all trajectories of a group are one population. gigpo: see `gigpo_advantages`. A control permutes
    or turns round the rewards of the whole batch's turns (gigpo: its outcomes and its turns' parts, each by itself).
    """
    control = config.control
    index = turn_index(trajectories)
    if control.zero_advantages:
        return torch.zeros(len(index), dtype=torch.float64)

    def controlled(values: list[float], part: str) -> Tensor:
        return torch.tensor(
            control_rewards(values, control.rewards, config.seed, "shuffle", part, step), dtype=torch.float64
        )

    rewards = [_shortened(t, config) for t in trajectories if t.turn_rewards is not None]
    return _own_advantages(config.algorithm, rewards, index, groups, controlled)


def _shortened(trajectory: Trajectory, config: RunConfig) -> TurnRewards:
    """The turns' rewards less what their lengths cost."""
    rewards = trajectory.turn_rewards
    assert rewards is not None
    cost = overlong_penalties(trajectory, config)
    return TurnRewards(rewards.outcome, [own + lost for own, lost in zip(rewards.turns, cost, strict=True)])


def has_signal(group: Group, algorithm: AlgorithmConfig) -> bool:
    """Whether any advantage of the group is other than 0, so that something can be learned from it.

    Where turns are rewarded apart their own advantages count: trajectories of the same mean reward may differ in them.
    What lengths cost does not count: DAPO looks at right and wrong.
    """
    ok = [t for t in group.trajectories if t.error is None]
    rewards = [t.turn_rewards for t in ok if t.turn_rewards is not None]
    if not rewards or len(rewards) < len(ok):
        return len({t.reward for t in ok}) > 1

    def as_they_are(values: list[float], _part: str) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    one_group = torch.zeros(len(ok), dtype=torch.long)
    return bool((_own_advantages(algorithm, rewards, turn_index(ok), one_group, as_they_are) != 0).any())


def _own_advantages(
    algorithm: AlgorithmConfig,
    rewards: list[TurnRewards],
    index: Tensor,
    groups: Tensor,
    tensor: Callable[[list[float], str], Tensor],
) -> Tensor:
    """Advantage of every turn, [turns]. tensor: makes one of the rewards' numbers and the name of that part of them."""
    norm = resolve(algorithm).advantage
    if algorithm.turn_advantage == "gigpo":
        outcomes = tensor([one.outcome for one in rewards], "outcome")
        own = tensor([value for one in rewards for value in one.turns], "turns")
        return gigpo_advantages(outcomes, own, index, groups, norm, algorithm.gigpo_discount, algorithm.gigpo_weight)
    totals = tensor([value for one in rewards for value in one.totals], "totals")
    return group_advantages(totals, groups[index], norm)


def trajectory_means(trajectories: list[Trajectory], per_turn: Tensor) -> Tensor:
    """Mean advantage of the turns of every trajectory, [trajectories]; 0 for one without turns."""
    index = turn_index(trajectories)
    sums = torch.zeros(len(trajectories), dtype=torch.float64).index_add_(0, index, per_turn.double())
    return sums / torch.bincount(index, minlength=len(trajectories)).clamp(min=1)


def turn_index(trajectories: list[Trajectory]) -> Tensor:
    """Number of the trajectory that each turn belongs to, [turns] int64."""
    return torch.tensor([i for i, t in enumerate(trajectories) for _ in t.turns], dtype=torch.long)
