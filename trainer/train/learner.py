"""The optimizer step: rows in, new weights and numbers out. Knows nothing of tasks, agents or engines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.losses import k3_kl
from trainer.algorithms.mismatch import sequence_keep, tis_weights
from trainer.algorithms.table import resolve
from trainer.config import RunConfig
from trainer.train.distributed import World, shard
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.packing import PackedBatch, group_identical, pack, share_out
from trainer.types import Row


@dataclass(slots=True)
class StepStats:
    """Numbers of one optimizer step, equal on all ranks. Means are over the trained tokens. stepped: False when there
    was nothing to learn from or the gradient was not finite; the weights are then as before.
    """

    values: dict[str, float]
    stepped: bool


def learning_rate(step: int, total: int, config: RunConfig) -> float:
    """Rate of optimizer step number `step` (from 0) of `total`: linear warm-up, then the schedule."""
    c = config.train
    if step < c.warmup_steps:
        return c.learning_rate * (step + 1) / c.warmup_steps
    if c.schedule == "constant":
        return c.learning_rate
    done = min(1.0, (step - c.warmup_steps) / max(1, total - c.warmup_steps))
    shape = 1 - done if c.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return c.learning_rate * (c.min_lr_ratio + (1 - c.min_lr_ratio) * shape)


class StepAbandonedError(Exception):
    """The step was given up before the optimizer moved anything."""


class Learner:
    """The policy, its optimizer and the ranks that share them.

    Args:
        lm: causal LM on this rank's device; sharded in place when there are several ranks.
        config: the run. total_optimizer_steps: for the learning-rate schedule.

    """

    # Sums over the trained tokens of a step, in this order in one tensor, so that one all-reduce carries them all.
    SUMS: tuple[str, ...] = (
        "loss", "kl", "clipped", "ratio", "neg_log_ratio", "entropy", "advantage", "mismatch", "kept", "tokens",
    )  # fmt: skip

    def __init__(self, lm: Any, config: RunConfig, world: World, total_optimizer_steps: int) -> None:
        self.config = config
        self.world = world
        self.algorithm = resolve(config.algorithm)
        self.total_optimizer_steps = total_optimizer_steps
        self.optimizer_steps = 0
        self.policy = PolicyModel(lm)
        shard(self.policy, world)
        decay = [p for p in self.policy.parameters() if p.ndim >= 2]
        plain = [p for p in self.policy.parameters() if p.ndim < 2]
        t = config.train
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": t.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=t.learning_rate,
            betas=(t.beta1, t.beta2),
            eps=t.eps,
        )

    def logprobs(self, rows: list[Row], policy: PolicyModel | None = None) -> list[list[float]]:
        """Log-probs of every row's response under the present policy (or another one), computed on all ranks."""
        model = policy or self.policy
        plan = self._plan(rows)[self.world.rank]
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for members in plan:
                batch = pack([rows[i] for i in members], self.world.device)
                logp, _ = self._forward(batch, model)
                pieces = logp.tolist()
                start = 0
                for i in members:
                    end = start + len(rows[i].response_ids)
                    found[i] = pieces[start:end]
                    start = end
        merged = {i: values for part in self.world.gather(found) for i, values in part.items()}
        return [merged[i] for i in range(len(rows))]

    def step(self, rows: list[Row], abandon: Callable[[], bool] = lambda: False) -> StepStats:
        """One optimizer step on rows that all ranks hold alike.

        `abandon` is asked before every micro-batch; True gives the step up with `StepAbandonedError`, nothing changed.
        Rows whose loss has no gradient (advantage 0 and no KL) are left out of the computation: their tokens are
        already in the weights' denominator. With no row left nothing changes at all, not even the optimizer's state.
        """
        active = [row for row in rows if row.advantage != 0 or self.config.algorithm.kl_coef > 0]
        if not active:
            return StepStats({"lr": self._rate(), "grad_norm": 0.0, "micro_batches": 0.0, "trained_tokens": 0.0}, False)
        self.policy.train()
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        plan = self._plan(active)[self.world.rank]
        sums = torch.zeros(len(self.SUMS), dtype=torch.float64)
        largest_deviation = 0.0
        for number, members in enumerate(plan):
            if abandon():
                self.optimizer.zero_grad(set_to_none=True)
                raise StepAbandonedError
            self._sync_gradients(number == len(plan) - 1)
            batch = pack([active[i] for i in members], self.world.device)
            loss, part, deviation = self._loss(batch)
            # FSDP averages gradients over ranks; the weights already make the sum over ranks the right one.
            (loss * self.world.size).backward()
            sums += part
            largest_deviation = max(largest_deviation, deviation)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.train.grad_clip)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
            self.optimizer_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        total = dict(zip(self.SUMS, self.world.sum(sums).tolist(), strict=True))
        return StepStats(
            self._means(total)
            | {
                "grad_norm": float(norm),
                "lr": rate,
                "micro_batches": float(len(plan)),
                "behave_ratio_max_dev": max(self.world.gather(largest_deviation)),
                "trained_rows": float(len(active)),
            },
            finite,
        )

    def _rate(self) -> float:
        return learning_rate(self.optimizer_steps, self.total_optimizer_steps, self.config)

    def _plan(self, rows: list[Row]) -> list[list[list[int]]]:
        """[rank][micro-batch] -> row numbers; rows of equal ids stay together and cost their length once."""
        groups = group_identical(rows)
        lengths = [rows[members[0]].num_tokens for members in groups]
        plans = share_out(lengths, self.world.size, self.config.train.max_tokens_per_mb)
        return [[[i for g in batch for i in groups[g]] for batch in plan] for plan in plans]

    def _sync_gradients(self, last: bool) -> None:
        """With several ranks, reduce gradients only after the last micro-batch."""
        if self.world.size > 1:
            self.policy.set_requires_gradient_sync(last)  # type: ignore[operator]

    def _forward(self, batch: PackedBatch, model: PolicyModel) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, batch, self.config.rollout.temperature, self.config.train.logprob_chunk)

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor, float]:
        """Weighted loss of one micro-batch (scalar), its sums [len(self.SUMS)] float64, largest |ratio - 1|."""
        a = self.config.algorithm
        logp, entropy = self._forward(batch, self.policy)
        old, behave = batch.old_logprobs, batch.behave_logprobs
        policy_loss, clipped = self.algorithm.policy_loss(logp, old, batch.advantages, batch.sequence)
        keep = sequence_keep(old, behave, batch.sequence, a.sequence_mask, a.mask_low, a.mask_high)
        token_loss = policy_loss * tis_weights(old, behave, a.tis_cap) * keep
        kl = k3_kl(logp, batch.ref_logprobs) if a.kl_coef > 0 else torch.zeros_like(logp)
        loss = (batch.weights * (token_loss + a.kl_coef * kl)).sum()
        with torch.no_grad():
            # A stand-in row of weight 0 keeps ranks in step and must not show in the statistics.
            real = (batch.weights > 0).double()
            log_ratio = (logp - old).double()
            mismatch = k3_kl(old, behave).double() if self.config.recomputes_old else k3_kl(logp, behave).double()
            part = torch.stack(
                [
                    loss.detach().double(),
                    *(
                        (value.double() * real).sum()
                        for value in (
                            kl, clipped, log_ratio.exp(), -log_ratio, entropy, batch.advantages, mismatch, keep,
                        )
                    ),
                    real.sum(),
                ]
            ).cpu()  # fmt: skip
            deviation = float(((log_ratio.exp() - 1).abs() * real).max())
        return loss, part, deviation

    def _means(self, total: dict[str, float]) -> dict[str, float]:
        tokens = max(total["tokens"], 1.0)
        return {
            "actor_loss": total["loss"],
            "kl_reward": -total["kl"] / tokens,
            "actor_clip_ratio": total["clipped"] / tokens,
            "importance_weight": total["ratio"] / tokens,
            "ppo_approx_kl": total["neg_log_ratio"] / tokens,
            "entropy": total["entropy"] / tokens,
            "advantage": total["advantage"] / tokens,
            "mismatch_kl": total["mismatch"] / tokens,
            "masked_tokens": total["tokens"] - total["kept"],
            "trained_tokens": total["tokens"],
        }
