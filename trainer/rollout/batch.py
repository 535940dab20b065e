"""From groups of trajectories to training rows: rewards, advantages, token weights, and the step's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import numpy as np
import torch

from trainer.algorithms.advantages import group_advantages, turn_advantages, zero_variance_groups
from trainer.algorithms.losses import token_weights
from trainer.algorithms.mismatch import sequence_keep
from trainer.algorithms.table import resolve
from trainer.config import RunConfig
from trainer.config_parts import AlgorithmConfig
from trainer.engines.sharing import common_prefix
from trainer.metrics import SPEEDS
from trainer.rollout.turn_advantages import (
    control_rewards,
    overlong_penalties,
    rewarded_turns,
    trajectory_means,
    turn_index,
)
from trainer.types import Group, Row, Trajectory

COUNTERS = ("empty_memory", "truncated_memory", "truncated_final", "truncated_context")


@dataclass(slots=True)
class TrainingBatch:
    """minibatches: rows of each optimizer step. advantages: one per trajectory, in the order of the groups.
    stats: numbers of the rollouts. metrics: those of the reward, by its own names; on rank 0.
    """

    minibatches: list[list[Row]]
    advantages: list[float]
    stats: dict[str, float]
    metrics: dict[str, float] = field(default_factory=dict)


class RewardMetrics:
    """Puts the metrics of a reward beside a step's own numbers: NAME, or reward/NAME once there was such a number.

    Args:
        warn: is told of every metric that has the name of a number, once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._renamed: set[str] = set()

    def beside(self, own: dict[str, float], metrics: dict[str, float]) -> dict[str, float]:
        """All numbers of a step. own: those that the trainer has recorded, all of them."""
        new = sorted((metrics.keys() & (own.keys() | set(SPEEDS))) - self._renamed)
        if new:
            self._renamed.update(new)
            names = ", ".join(f"{name} as reward/{name}" for name in new)
            self._warn(f"metrics of the reward have names of the step's own numbers and are recorded apart: {names}")
        return own | {f"reward/{name}" if name in self._renamed else name: value for name, value in metrics.items()}


def make_batch(groups: list[Group], config: RunConfig, step: int) -> TrainingBatch:
    """Rows for the optimizer steps of one training step.

    Tasks are split evenly over `train.minibatches`; token weights are normalised within each. Failed trajectories
    have no rows and stay out of their group's mean.
    """
    algorithm = resolve(config.algorithm)
    trajectories = [t for group in groups for t in group.trajectories]
    ok = [i for i, t in enumerate(trajectories) if t.error is None]
    group_of = [g for g, group in enumerate(groups) for _ in group.trajectories]
    cost = [overlong_penalties(t, config) for t in trajectories]
    # Where turns are rewarded apart `reward` is their mean.
    lost = [sum(c) / len(c) if t.turn_rewards and c else sum(c) for t, c in zip(trajectories, cost, strict=True)]
    shaped = [t.reward + less for t, less in zip(trajectories, lost, strict=True)]
    rewards = control_rewards(shaped, config.control.rewards, config.seed, "shuffle", step)
    numbers = torch.tensor([group_of[i] for i in ok], dtype=torch.long)
    advantages = torch.zeros(len(trajectories), dtype=torch.float64)
    signal, of_group = advantages[ok], numbers
    if ok and all(trajectories[i].turn_rewards for i in ok):
        scored = [trajectories[i] for i in ok]
        per_turn = rewarded_turns(scored, numbers, config, step)
        advantages[ok] = trajectory_means(scored, per_turn)
        # Turns whose advantages add up to nothing are learned from all the same.
        signal, of_group = per_turn, numbers[turn_index(scored)]
    else:
        if ok:
            values = group_advantages(torch.tensor([rewards[i] for i in ok]), numbers, algorithm.advantage)
            advantages[ok] = 0.0 if config.control.zero_advantages else values
            signal = advantages[ok]
        per_turn = turn_advantages(advantages, turn_index(trajectories), config.algorithm.credit)
    flat = turn_rows(trajectories, per_turn, config)
    per_batch = len(groups) // config.train.minibatches
    minibatches = []
    for number in range(config.train.minibatches):
        first, last = number * per_batch, (number + 1) * per_batch
        rows = [row for row in flat if first <= group_of[row.trajectory] < last]
        sampled = sum(first <= group_of[i] < last for i in ok)
        set_weights(rows, algorithm.loss_norm, sampled, config.response_limit)
        minibatches.append(rows)
    stats = rollout_stats(trajectories, rewards, advantages, flat)
    if stats["prompt_tokens"]:
        stats["shareable_share"] = 1 - sum(map(distinct_prompt_tokens, groups)) / stats["prompt_tokens"]
    stats["zero_variance_groups"] = float(zero_variance_groups(signal, of_group)) if ok else float(len(groups))
    if any(config.overlong_buffer(config.agent.response_limit(kind)) for kind in ("final", "update")):
        stats["overlong_penalty"] = sum(lost) / max(len(lost), 1)
    return TrainingBatch(minibatches, advantages.tolist(), stats, reward_metrics(trajectories))


def turn_rows(trajectories: list[Trajectory], per_turn: torch.Tensor, config: RunConfig) -> list[Row]:
    """One row per turn, with its advantage: [turns], in the order of the trajectories. Weights are still to be set."""
    turns = [(i, turn) for i, t in enumerate(trajectories) for turn in t.turns]
    rows = []
    for (i, turn), advantage in zip(turns, per_turn.tolist(), strict=True):
        completion = turn.completion
        if config.algorithm.drop_truncated_final and turn.kind == "final" and completion.finish_reason == "length":
            continue
        row = Row(turn.prompt_ids, completion.token_ids, completion.logprobs, advantage, weight=0.0, trajectory=i)
        row.array = turn.ids
        rows.append(row)
    return rows


def leave_out_rejected(batch: TrainingBatch, config: RunConfig) -> int:
    """Take the rows that sequence_mask rejects out of the batch and weigh the others anew; tokens that were left out.

    All rows have old log-probs.
    """
    a, norm = config.algorithm, resolve(config.algorithm).loss_norm
    left_out = 0
    for number, rows in enumerate(batch.minibatches):
        kept = [row for row in rows if not _is_rejected(row, a)]
        left_out += sum(len(row.response_ids) for row in rows) - sum(len(row.response_ids) for row in kept)
        if norm != "constant":  # which depends on no row
            set_weights(kept, norm)
        batch.minibatches[number] = kept
    return left_out


def _is_rejected(row: Row, a: AlgorithmConfig) -> bool:
    old, behave = torch.tensor(row.old_logprobs), torch.tensor(row.behave_logprobs)
    sequence = torch.zeros(len(old), dtype=torch.long)
    return not bool(sequence_keep(old, behave, sequence, a.sequence_mask, a.mask_low, a.mask_high).all())


def set_weights(rows: list[Row], norm: str, trajectories: int = 0, limit: int = 0) -> None:
    """Give every row its tokens' weight in the loss of one optimizer step.

    trajectories: that were sampled for it, those included of which no row is left. limit: response tokens of each.
    """
    if not rows:
        return
    # Trajectory numbers are counted from 0 within the step, without gaps that would count as trajectories.
    order = {number: i for i, number in enumerate(sorted({row.trajectory for row in rows}))}
    tokens = torch.tensor([len(row.response_ids) for row in rows])
    index = torch.tensor([order[row.trajectory] for row in rows])
    for row, weight in zip(rows, token_weights(tokens, index, norm, trajectories, limit).tolist(), strict=True):  # type: ignore[arg-type]
        row.weight = weight


def rollout_stats(
    trajectories: list[Trajectory], rewards: list[float], advantages: torch.Tensor, rows: list[Row]
) -> dict[str, float]:
    """AReaL's names where it has one for the thing, ours for the rest."""
    count = max(len(trajectories), 1)
    turns = [turn for t in trajectories for turn in t.turns]
    prompt = sum(len(turn.prompt_ids) for turn in turns)
    sampled = sum(len(turn.completion.token_ids) for turn in turns)
    finals = [t.turns[-1] for t in trajectories if t.turns]
    counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
    for t in trajectories:
        counters.update(t.counters)
    return {
        "task_reward": sum(t.reward for t in trajectories) / count,
        "final_reward": sum(rewards) / count,
        "advantage_abs": float(advantages.abs().mean()) if len(advantages) else 0.0,
        "avg_seq_len": (prompt + sampled) / max(len(turns), 1),
        "avg_prompt_len": prompt / max(len(turns), 1),
        "n_tokens": float(prompt + sampled),
        "n_valid_tokens": float(sum(row.num_tokens for row in rows)),
        "n_seqs": float(len(trajectories)),
        "no_eos_ratio": sum(f.completion.finish_reason == "length" for f in finals) / max(len(finals), 1),
        "disable_value": 1.0,
        "mask_no_eos_with_zero": 0.0,
        "turns": float(len(turns)),
        "prompt_tokens": float(prompt),
        "sampled_tokens": float(sampled),
        "failed_trajectories": float(sum(t.error is not None for t in trajectories)),
        **{name: float(count) for name, count in counters.items()},
    }


def reward_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """What a reward left in `metrics`, as means of the trajectories that have it."""
    metrics: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.metrics.items():
            metrics.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in metrics.items()}


def distinct_prompt_tokens(group: Group) -> int:
    """Of all turns of all trajectories of a group; see `distinct_tokens`."""
    turns = [turn for trajectory in group.trajectories for turn in trajectory.turns]
    return distinct_tokens([turn.ids[: 4 * len(turn.prompt_ids)] for turn in turns])


def distinct_tokens(prompts: list[bytes]) -> int:
    """Tokens of the tree that prompts (`packed_ids`) make: each counts only from where it leaves all others.

    Sorted, each prompt's longest common prefix with any before it is that with its neighbour; for that any order of
    token ids will do, and bytes are compared as fast as memory is read.
    """
    ids = [np.frombuffer(prompt, dtype=np.int32) for prompt in sorted(prompts)]
    shared = sum(common_prefix(one, other) for one, other in pairwise(ids))
    return sum(map(len, ids)) - shared
