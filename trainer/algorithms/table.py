"""The algorithm table: an algorithm is a row of settings over the same few functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from trainer.algorithms.losses import cispo, gspo, ppo_clip
from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Algorithm:
    """loss: shape of the surrogate. advantage, loss_norm: see trainer.config. clip_low, clip_high: ratio range
    [1 - clip_low, 1 + clip_high]. dual_clip: None is off.
    """

    loss: Literal["ppo", "gspo", "cispo"]
    advantage: Literal["mean", "mean_std"]
    loss_norm: Literal["token", "trajectory_mean", "constant"]
    clip_low: float
    clip_high: float
    dual_clip: float | None

    def policy_loss(self, logp: Tensor, old_logp: Tensor, advantage: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Per-token loss and clip indicator; arguments as in trainer.algorithms.losses."""
        if self.loss == "gspo":
            return gspo(logp, old_logp, advantage, sequence, self.clip_low, self.clip_high)
        if self.loss == "cispo":
            return cispo(logp, old_logp, advantage, self.clip_low, self.clip_high)
        return ppo_clip(logp, old_logp, advantage, self.clip_low, self.clip_high, self.dual_clip)


TABLE: dict[str, Algorithm] = {
    # MemAgent's released settings: mean-only advantage, symmetric clip, dual clip, one mean over all tokens.
    "grpo": Algorithm("ppo", "mean", "token", 0.2, 0.2, 3.0),
    # DAPO: clip-higher, std-normalised advantage, token mean.
    "dapo": Algorithm("ppo", "mean_std", "token", 0.2, 0.28, None),
    # Dr. GRPO: neither the group's std nor the response's length may weigh.
    "dr_grpo": Algorithm("ppo", "mean", "constant", 0.2, 0.2, None),
    # GSPO: the paper's ranges; trajectories weigh the same, within them every token.
    "gspo": Algorithm("gspo", "mean_std", "trajectory_mean", 3e-4, 4e-4, None),
    # CISPO: only the upper range acts.
    "cispo": Algorithm("cispo", "mean_std", "token", 1.0, 5.0, None),
}


def resolve(config: AlgorithmConfig) -> Algorithm:
    """The configured row, with the fields that are set in the configuration put over it."""
    row = TABLE[config.name]
    given = {
        name: value
        for name in ("advantage", "loss_norm", "clip_low", "clip_high", "dual_clip")
        if (value := getattr(config, name)) is not None
    }
    return replace(row, **given)
