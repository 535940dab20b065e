"""The optimizer step of supervised learning: the mean of the answers' token losses, at temperature 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainer.train.learner import Learner, StepStats
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.packing import PackedBatch
from trainer.types import Row


class SftLearner(Learner):
    """As `Learner`, with cross entropy instead of a policy's loss."""

    SUMS = ("loss", "entropy", "likely", "tokens")

    def step(self, rows: list[Row], abandon: Callable[[], bool] = lambda: False) -> StepStats:
        """See `Learner.step`."""
        stats = super().step(rows, abandon)
        stats.values.pop("behave_ratio_max_dev", None)  # nothing was sampled
        return stats

    def _forward(self, batch: PackedBatch, model: PolicyModel) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, batch, 1.0, self.config.train.logprob_chunk)

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        logp, entropy = self._forward(batch, self.policy)
        # A stand-in row of weight 0 keeps ranks in step and must not show in the loss or the statistics.
        real = batch.weights > 0
        loss = -(batch.weights * torch.where(real, logp, 0.0)).sum()
        with torch.no_grad():
            likely = real & (logp > -0.6931)
            sums = [
                loss.double(), torch.where(real, entropy.double(), 0.0).sum(), likely.double().sum(),
                real.double().sum(),
            ]  # fmt: skip
            part = torch.stack(sums)
        return loss, part, torch.zeros_like(part[0])

    def _means(self, total: dict[str, float]) -> dict[str, float]:
        """loss: per answer token. likely: share of the answers' tokens that had more than half of the probability."""
        tokens = max(total["tokens"], 1.0)
        return {
            "loss": total["loss"],
            "entropy": total["entropy"] / tokens,
            "likely": total["likely"] / tokens,
            "trained_tokens": total["tokens"],
        }
