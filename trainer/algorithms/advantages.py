"""Group-relative advantages (GRPO, arXiv 2402.03300; mean-only as in Dr. GRPO, arXiv 2503.20783, and MemAgent).

One scalar per trajectory, computed over the trajectories of a task before they are expanded into turns, then copied
to every turn.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EPS = 1e-6


def group_advantages(rewards: Tensor, groups: Tensor, norm: Literal["mean", "mean_std"]) -> Tensor:
    """Reward minus the mean of its group, optionally divided by the group's unbiased standard deviation plus 1e-6.

    Args:
        rewards: [trajectories] float.
        groups: [trajectories] int64; trajectories with the same number belong to the same task. Any numbers, any order.
        norm: "mean" or "mean_std".

    Returns:
        [trajectories] float64. A group of one, and a group of equal rewards, gets exactly 0.
    """
    rewards = rewards.double()
    _, member, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    mean = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, member, rewards) / sizes
    centred = rewards - mean[member]
    # Rewards that are equal must give exactly 0, also where their mean is not representable.
    low = torch.full((len(sizes),), torch.inf, dtype=torch.float64).scatter_reduce_(0, member, rewards, "amin")
    high = torch.full((len(sizes),), -torch.inf, dtype=torch.float64).scatter_reduce_(0, member, rewards, "amax")
    centred = torch.where((low == high)[member], 0.0, centred)
    if norm == "mean":
        return centred
    squares = torch.zeros_like(mean).index_add_(0, member, centred**2)
    std = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return centred / (std[member] + EPS)


def turn_advantages(advantages: Tensor, trajectory_of_turn: Tensor, credit: Literal["share", "split"]) -> Tensor:
    """Advantage of every turn from that of its trajectory.

    Args:
        advantages: [trajectories] float. trajectory_of_turn: [turns] int64, index into it.
        credit: "share" copies it unchanged (MemAgent), "split" divides it by the trajectory's number of turns (vime).

    Returns:
        [turns] float.
    """
    per_turn = advantages[trajectory_of_turn]
    if credit == "share":
        return per_turn
    turns = torch.bincount(trajectory_of_turn, minlength=len(advantages))
    return per_turn / turns[trajectory_of_turn]


def gigpo_advantages(
    outcomes: Tensor,
    own: Tensor,
    trajectory_of_turn: Tensor,
    groups: Tensor,
    norm: Literal["mean", "mean_std"],
    discount: float,
    weight: float,
) -> Tensor:
    """Advantage of turns that are rewarded apart, in two parts (GiGPO, Feng et al. 2025, arXiv 2505.10978).

    weight · (the trajectory's outcome among its group's) + (the turn's return among the returns of the group's turns of
    the same number), where a return is the turn's own reward plus `discount` times that of the next turn, and so on.
    Turns of the same number read the same chunk: they are GiGPO's groups of equal states.

    Args:
        outcomes: [trajectories] float. own: [turns] float, each turn's own part.
        trajectory_of_turn: [turns] int64, ascending; the turns of a trajectory stand in their order.
        groups: [trajectories] int64, as in `group_advantages`. norm: the same.
        discount: 0 to 1. weight: of the trajectory's part.

    Returns:
        [turns] float64.
    """
    position = _turn_numbers(trajectory_of_turn)
    returns = own.double().clone()
    for turn in range(len(returns) - 2, -1, -1):
        if trajectory_of_turn[turn] == trajectory_of_turn[turn + 1]:
            returns[turn] += discount * returns[turn + 1]
    group_of_turn = groups[trajectory_of_turn]
    longest = int(position.max()) + 1 if len(position) else 1
    of_turns = group_advantages(returns, group_of_turn * longest + position, norm)
    return weight * group_advantages(outcomes, groups, norm)[trajectory_of_turn] + of_turns


def _turn_numbers(trajectory_of_turn: Tensor) -> Tensor:
    """Number of every turn within its trajectory, from 0."""
    first = torch.searchsorted(trajectory_of_turn, trajectory_of_turn)
    return torch.arange(len(trajectory_of_turn)) - first


def zero_variance_groups(advantages: Tensor, groups: Tensor) -> int:
    """Number of groups without a learning signal: every advantage is 0."""
    unique, member = torch.unique(groups, return_inverse=True)
    largest = torch.zeros(len(unique), dtype=advantages.dtype).scatter_reduce_(0, member, advantages.abs(), "amax")
    return int((largest == 0).sum())
