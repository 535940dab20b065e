"""What an optimizer step minimises, per micro-batch: the policy's loss, corrected for the engine, and the KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.algorithms.losses import cispo, gspo, k3_kl, ppo_clip
from trainer.algorithms.mismatch import sequence_keep, tis_weights
from trainer.algorithms.table import Algorithm

if TYPE_CHECKING:
    from trainer.config_parts import AlgorithmConfig


def policy_loss(
    row: Algorithm, logp: Tensor, old_logp: Tensor, advantage: Tensor, sequence: Tensor
) -> tuple[Tensor, Tensor]:
    """Per-token loss and clip indicator of a row of the table; arguments as in trainer.algorithms.losses."""
    if row.loss == "gspo":
        return gspo(logp, old_logp, advantage, sequence, row.clip_low, row.clip_high)
    if row.loss == "cispo":
        return cispo(logp, old_logp, advantage, row.clip_low, row.clip_high)
    return ppo_clip(logp, old_logp, advantage, row.clip_low, row.clip_high, row.dual_clip)


@dataclass(frozen=True, slots=True)
class Objective:
    """loss: scalar with gradient. kept [tokens] bool: what is learned from. clipped [tokens] bool and kl [tokens]: 0
    where nothing is learned.
    """

    loss: Tensor
    kept: Tensor
    clipped: Tensor
    kl: Tensor


def objective(
    row: Algorithm,
    config: AlgorithmConfig,
    logp: Tensor,
    old_logp: Tensor,
    behave_logp: Tensor,
    ref_logp: Tensor,
    advantage: Tensor,
    weight: Tensor,
    sequence: Tensor,
) -> Objective:
    """Weighted sum of the token losses that are learned from.

    A response that `sequence_mask` rejects has no policy loss and no KL (AReaL takes it out of its loss mask, verl out
    of the response mask, which both losses are summed over). A token that is not learned from is replaced before
    anything is computed of it: multiplied by 0 afterwards, an infinite gradient would make the whole step's NaN.

    Args:
        row: of the table. config: the masks, the cap and the KL's weight.
        logp: [tokens] float, of the policy in training; the gradient flows here.
        old_logp: [tokens], where the policy's ratio starts from. behave_logp: [tokens], the engine's.
        ref_logp: [tokens], the frozen reference's; looked at only with a KL.
        advantage, weight: [tokens]; tokens of weight 0 are not learned from. sequence: [tokens] int64.
    """
    keep = sequence_keep(old_logp, behave_logp, sequence, config.sequence_mask, config.mask_low, config.mask_high)
    learned = keep & (weight > 0)
    nothing = torch.zeros((), dtype=logp.dtype, device=logp.device)

    def chosen(values: Tensor) -> Tensor:
        return torch.where(learned, values, nothing.to(values.dtype))

    logp, old_logp = chosen(logp), chosen(old_logp)
    loss, clipped = policy_loss(row, logp, old_logp, chosen(advantage), sequence)
    loss = loss * tis_weights(old_logp, chosen(behave_logp), config.tis_cap)
    kl = k3_kl(logp, chosen(ref_logp)) if config.kl_coef > 0 else torch.zeros_like(logp)
    return Objective((weight * (loss + config.kl_coef * kl)).sum(), learned, clipped & learned, kl)
