"""The optimizer step: rows in, new weights and numbers out. Knows nothing of tasks, agents or engines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainer.algorithms.losses import k3_kl, ratio_of
from trainer.algorithms.objective import objective
from trainer.algorithms.table import resolve
from trainer.config import RunConfig
from trainer.config_parts import LESS_MEMORY
from trainer.errors import RunError, UserError
from trainer.train.distributed import (
    World,
    clip_gradients,
    give_back,
    keeps_whole_gradients,
    set_gradient_sync,
    shard,
)
from trainer.train.flops import ModelFlops, Work, gpu_memory
from trainer.train.layers import can_compile, prepare_layers
from trainer.train.layout import keeps_kernel
from trainer.train.loading import fill
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.lora import base_digest
from trainer.train.microbatches import beyond_budget, share_out
from trainer.train.offload import HostRoom
from trainer.train.packing import PackedBatch, pack
from trainer.train.prefixes import prefix_groups
from trainer.train.shares import Plan, deal
from trainer.train.tensorparallel import parameter_groups, split_layers
from trainer.train.weightfiles import Weights
from trainer.types import Row


@dataclass(slots=True)
class StepStats:
    """Numbers of one optimizer step, equal on all ranks. Means are over the trained tokens. stepped: False when there
    was nothing to learn from or the gradient was not finite; the weights are then as before. work: what it took.
    """

    values: dict[str, float]
    stepped: bool
    work: Work = field(default_factory=Work)


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


class RowCount(NamedTuple):
    """How many rows there are, the tokens that are computed again because groups have no room in a micro-batch, and the
    budget in which those that begin alike have.
    """

    rows: int
    repeated: int = 0
    room: int = 0


class StepAbandonedError(Exception):
    """The step was given up before the optimizer moved anything."""


class Learner:
    """The policy, its optimizer and the ranks that share them.

    Args:
        lm: causal LM on this rank's device, or on the meta device where `weights` has its values; sharded in place when
            there are several ranks.
        config: the run. total_optimizer_steps: for the learning-rate schedule.
    """

    # Sums over the trained tokens of a step, in this order in one tensor, so that one all-reduce carries them all.
    SUMS: tuple[str, ...] = (
        "loss", "kl", "clipped", "ratio", "neg_log_ratio", "entropy", "advantage", "mismatch", "gap", "kept",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, lm: Any, config: RunConfig, world: World, total_optimizer_steps: int, weights: Weights | None = None
    ) -> None:
        self.config = config
        self.world = world
        self.algorithm = resolve(config.algorithm)
        self.total_optimizer_steps = total_optimizer_steps
        self.optimizer_steps = 0
        self.host = HostRoom()
        self.flops = ModelFlops.of(lm)
        compiled = can_compile(world.device) if config.train.compile is None else config.train.compile
        self._kernel_shares = keeps_kernel(lm, world.device, world.dtype)
        # Layers that ranks share are compiled only where that is asked for: no whole run had it yet.
        layers_compiled = compiled and (world.tensor_size == 1 or config.train.compile is not None)
        if layers_compiled and world.tensor_size > 1 and config.model.gradient_checkpointing == "full":
            raise UserError(
                "train.compile=true: PyTorch cannot compile layers that tensor parallel ranks share (t) where all of "
                "their activations are computed again: set model.gradient_checkpointing=selective, or leave "
                "train.compile out"
            )
        split_layers(lm, world)
        prepare_layers(lm, config.model.gradient_checkpointing, layers_compiled)
        self.policy = PolicyModel(lm, compiled)
        shard(self.policy, world)
        if weights is not None:
            fill(lm, weights, world.device)
        self.base = base_digest(self.policy, world)  # of what adapters belong to, for their checkpoints
        self._sync_once = keeps_whole_gradients(self.policy, world)
        t = config.train
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.policy, t.weight_decay),
            lr=t.learning_rate,
            betas=(t.beta1, t.beta2),
            eps=t.eps,
            fused=True if world.device.type == "cuda" else None,
        )

    def offload(self, weights: bool = True) -> None:
        """Move optimizer state, and weights where wanted, to host memory (train.offload) until they are needed; on a
        CPU nothing is moved.
        """
        if self.world.device.type == "cpu":
            return
        self.host.put_state(self.optimizer)
        if weights:
            self.host.put_weights(self.policy)

    def wake(self, state: bool = True) -> None:
        """Have the weights, and the optimizer state where wanted, on the device. `step` and `logprobs` do it."""
        self.host.fetch_weights(self.policy, self.world.device)
        if state:
            self.host.fetch_state(self.optimizer, self.world.device)

    def logprobs(self, rows: list[Row], policy: nn.Module | None = None) -> list[list[float]]:
        """Log-probs of every row's response under the present policy (or another one), computed on all ranks.

        Args:
            rows: on rank 0, which also gets the result; of the other ranks they are not looked at, and get nothing.

        Raises:
            RunError: the GPU's memory did not suffice.
        """
        plan, there = self._plan(rows)
        if not there.rows:
            return []
        self.wake(state=False)
        model = policy or self.policy
        batches = deal(rows, plan, self.world)
        with torch.no_grad(), self._memory("log-probs"):
            # Fetched together at the end: a value that is fetched makes the host wait for the device.
            pieces = [self._forward(self._pack(batch), model)[0] for batch in batches]
            values = torch.cat(pieces).cpu().numpy()
        give_back(model)
        found: dict[int, list[float]] = {}
        for share, part in zip(plan, self.world.collect(values)[:: self.world.tensor_size], strict=True):
            start = 0
            for members in share:
                for i in members:
                    end = start + len(rows[i].response_ids)
                    found[i] = part[start:end].tolist()
                    start = end
                start += 0 if members else 1  # the stand-in of an empty micro-batch
        return [found[i] for i in range(len(rows) if self.world.is_main else 0)]

    def step(self, rows: list[Row], abandon: Callable[[], bool] = lambda: False) -> StepStats:
        """One optimizer step on the rows of rank 0; those of the other ranks are not looked at.

        `abandon` is asked before every micro-batch (of a sharded model: before the first); True gives the step up with
        `StepAbandonedError`, nothing changed.
        Rows whose loss has no gradient (advantage 0 and no KL) are left out of the computation: their tokens are
        already in the weights' denominator. With no row left nothing changes at all, not even the optimizer's state.
        Where old log-probs are to be the trainer's own and the rows have none, they are those of this very pass: no
        weight changes before its end.
        The host waits for the device once, after the last micro-batch.

        Raises:
            RunError: the GPU's memory did not suffice.
        """
        active = [row for row in rows if row.advantage != 0 or self.config.algorithm.kl_coef > 0]
        plan, there = self._plan(active, measured=True)
        if not there.rows:
            return StepStats({"lr": self._rate(), "grad_norm": 0.0, "micro_batches": 0.0, "trained_tokens": 0.0}, False)
        began = time.perf_counter()
        self.wake()
        device = self.world.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        _, earlier = gpu_memory(device)
        self.policy.train()
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batches = deal(active, plan, self.world)
        sums = torch.zeros(len(self.SUMS), dtype=torch.float64, device=device)
        # Largest |ratio - 1|, and the host's count: tokens, loss positions and Σ length² that were computed, then the
        # same of whole rows.
        worst = torch.zeros((), dtype=torch.float64, device=device)
        work = np.zeros(6)
        with self._memory("a training step"):
            for number, members in enumerate(batches):
                # Sharded layers hold sums of gradients that only a whole step takes away again.
                if (number == 0 or self.world.mesh is None) and abandon():
                    self.optimizer.zero_grad(set_to_none=True)
                    raise StepAbandonedError
                set_gradient_sync(self.policy, self.world, number == len(batches) - 1, self._sync_once)
                batch = self._pack(members)
                whole = self._whole(members)
                loss, part, deviation = self._loss(batch)
                # FSDP averages gradients over ranks; the weights already make the sum over ranks the right one.
                (loss * self.world.data_size).backward()
                sums += part
                worst = torch.maximum(worst, deviation)
                work += (batch.layout.num_tokens, len(batch.targets), self.flops.squares(batch.layout.spans), *whole)
            norm = clip_gradients(list(self.policy.parameters()), self.config.train.grad_clip, self.world)
            finite = bool(torch.isfinite(norm))
            if finite:
                self.optimizer.step()
                self.optimizer_steps += 1
            self.optimizer.zero_grad(set_to_none=True)
        counted = torch.from_numpy(work).to(device)
        totals = self.world.sum_of_parts(torch.cat([sums, counted])).tolist()
        total = dict(zip(self.SUMS, totals, strict=False))
        peak, so_far = gpu_memory(device)
        most = self.world.max(torch.cat([worst[None], worst.new_tensor([peak, so_far - earlier])]))
        deviation, peak, retries = most.tolist()
        computed, of_rows = totals[len(self.SUMS) : -3], totals[-3:]
        return StepStats(
            self._means(total)
            | {
                "grad_norm": float(norm),
                "lr": rate,
                "micro_batches": float(len(batches)),
                "behave_ratio_max_dev": deviation,
                "trained_rows": float(there.rows),
            },
            finite,
            Work(
                time.perf_counter() - began,
                int(computed[0]),
                self.flops.training(*computed),
                int(peak),
                int(of_rows[0]),
                self.flops.training(*of_rows),
                int(retries),
                there.repeated,
                there.room,
            ),
        )

    @property
    def shares_prefixes(self) -> bool:
        """Whether what rows begin with alike is computed once."""
        return self.config.train.share_prefixes and self._kernel_shares

    def _rate(self) -> float:
        return learning_rate(self.optimizer_steps, self.total_optimizer_steps, self.config)

    def _plan(self, rows: list[Row], measured: bool = False) -> tuple[Plan, RowCount]:
        """Who computes which of rank 0's rows, known there only, and on every rank what rows there are.

        Rows that share a prefix stay together and cost it once. measured: with what more room would save.
        """
        plan: Plan = []
        found = RowCount(len(rows))
        if self.world.is_main and rows:
            groups = prefix_groups(rows, self.shares_prefixes)
            lengths = [row.num_tokens for row in rows]
            ranks, budget = self.world.data_size, self.config.train.max_tokens_per_mb
            plan = share_out(groups, lengths, ranks, budget)
            if measured:
                found = RowCount(len(rows), *beyond_budget(plan, groups, lengths, budget))
        return plan, self.world.broadcast(found)

    def _pack(self, rows: list[Row]) -> PackedBatch:
        return pack(rows, self.world.device, self.shares_prefixes, self.world.tensor_size)

    def _whole(self, rows: list[Row]) -> tuple[int, int, float]:
        """Tokens, loss positions and Σ length² of rows if each were computed whole."""
        return (
            sum(row.num_tokens for row in rows),
            sum(len(row.response_ids) for row in rows),
            self.flops.squares((0, row.num_tokens) for row in rows),
        )

    @contextmanager
    def _memory(self, what: str) -> Iterator[None]:
        """Turn the end of a GPU's memory into words."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RunError(self._out_of_memory(what, error)) from error

    def _out_of_memory(self, what: str, error: Exception) -> str:
        t, m = self.config.train, self.config.model
        device = self.world.device
        used, size = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        remedies = [f"train.max_tokens_per_mb below {t.max_tokens_per_mb} (a longer conversation is alone)"]
        if m.gradient_checkpointing != "offloaded":
            remedies.append(f"model.gradient_checkpointing={LESS_MEMORY[m.gradient_checkpointing]}")
        if t.logprob_chunk > 1024:
            remedies.append(f"train.logprob_chunk={t.logprob_chunk // 4}")
        remedies.append("more training GPUs")
        return (
            f"GPU {device.index} of rank {self.world.rank} ran out of memory in {what} ({used / 2**30:.1f} of "
            f"{size / 2**30:.1f} GiB were the trainer's: {str(error).splitlines()[0].rstrip('.')}): set "
            f"{', or '.join(remedies)}; the same command then goes on from the last recover checkpoint"
        )

    def _forward(self, batch: PackedBatch, model: nn.Module) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, batch, self.config.rollout.temperature, self.config.train.logprob_chunk)

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss of one micro-batch (scalar), its sums [len(self.SUMS)] and largest |ratio - 1|, both float64
        on the device.
        """
        logp, entropy = self._forward(batch, self.policy)
        behave = batch.behave_logprobs
        old = batch.old_logprobs
        if self.config.recomputes_old:
            old = torch.where(batch.lacks_old, logp.detach(), old)
        found = objective(
            self.algorithm, self.config.algorithm, logp, old, behave, batch.ref_logprobs, batch.advantages,
            batch.weights, batch.sequence,
        )  # fmt: skip
        with torch.no_grad():
            # A stand-in row of weight 0 keeps ranks in step and must not show in the statistics.
            real = batch.weights > 0
            log_ratio = (logp - old).double()
            ratio = ratio_of(logp.double(), old.double())
            own = old if self.config.recomputes_old else logp
            mismatch, gap = k3_kl(own, behave).double(), (own - behave).abs()
            numbers = (
                found.kl, found.clipped, ratio, -log_ratio, entropy, batch.advantages, mismatch, gap, found.kept,
                real,
            )  # fmt: skip
            part = torch.stack(
                [found.loss.detach().double(), *(torch.where(real, value.double(), 0.0).sum() for value in numbers)]
            )
            deviation = torch.where(real, (ratio - 1).abs(), 0.0).max()
        return found.loss, part, deviation

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
            "mismatch_logp": total["gap"] / tokens,
            "masked_tokens": total["tokens"] - total["kept"],
            "trained_tokens": total["tokens"],
        }
