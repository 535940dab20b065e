"""Engine against trainer: the same weights need not give the same log-probs (other kernels, dtypes, versions).

Truncated importance sampling weighs a token by min(cap, p_trainer / p_engine) (Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"); sequence masks leave out whole responses that drifted too far.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.losses import ratio_of, sequence_mean


def tis_weights(old_logp: Tensor, behave_logp: Tensor, cap: float) -> Tensor:
    """min(cap, exp(old_logp - behave_logp)) per token, without gradient. [tokens] -> [tokens]. cap 0: all ones."""
    if cap <= 0:
        return torch.ones_like(old_logp)
    return ratio_of(old_logp.detach(), behave_logp).clamp(max=cap)


def sequence_keep(
    old_logp: Tensor,
    behave_logp: Tensor,
    sequence: Tensor,
    rule: Literal["none", "max", "geometric"],
    low: float,
    high: float,
) -> Tensor:
    """Which tokens are kept, [tokens] bool, whole responses at a time.

    "max": every token's ratio p_trainer / p_engine must lie in [low, high]. "geometric": the geometric mean over the
    response must.
    """
    if rule == "none" or not len(sequence):
        return torch.ones_like(old_logp, dtype=torch.bool)
    log_ratio = (old_logp - behave_logp).detach()
    # Compared as it is: an infinite ratio is outside like any other, and so is one that is no number.
    if rule == "geometric":
        ratio = sequence_mean(log_ratio, sequence).exp()
        return (ratio >= low) & (ratio <= high)
    ratio = log_ratio.exp()
    outside = (~((ratio >= low) & (ratio <= high))).to(torch.float64)
    count = torch.zeros(int(sequence.max()) + 1, dtype=torch.float64, device=outside.device)
    return count.index_add_(0, sequence, outside)[sequence] == 0
