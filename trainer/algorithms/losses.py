"""Policy losses and KL: pure functions of log-probs, tensors and floats in, tensors out.

All are per token, [tokens] float, to be multiplied by the token's weight (`token_weights`) and summed over all ranks
and micro-batches of a step. Because the weight is fixed before the batch is split, the gradient does not depend on how
rows are spread over ranks, micro-batches or positions, and rows of weight 0 change nothing.
Where a loss looks at whole responses, `sequence` [tokens] int64 names the response that each token belongs to.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KL_CLAMP = 10.0
LOG_RATIO_BOUND = 20.0
"""Log-ratios are kept within ± this before exp, as verl does: exp(100) is infinite in float32, and an infinite ratio
whose loss a clip cuts off has a gradient of infinity times zero, which is NaN.
"""


def ratio_of(logp: Tensor, other_logp: Tensor) -> Tensor:
    """exp(logp - other_logp), always finite for finite log-probs; beyond the bound the gradient is 0."""
    return (logp - other_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Mean of `values` over each sequence, spread back over its tokens. [tokens] -> [tokens]."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    sums = values.new_zeros(count).index_add_(0, sequence, values)
    sizes = values.new_zeros(count).index_add_(0, sequence, torch.ones_like(values))
    return (sums / sizes.clamp(min=1))[sequence]


def ppo_clip(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float, dual: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate (PPO, arXiv 1707.06347) with separate ranges (DAPO) and dual clip (arXiv 1912.09729).

    Args:
        logp: [tokens] log-probs of the policy in training; the gradient flows here. old_logp: of the policy that
            sampled. advantage: [tokens].
        low, high: the ratio is clipped to [1 - low, 1 + high]. dual: with negative advantage the loss is at most
            dual · |advantage|; None: off.

    Returns:
        (loss [tokens], clipped [tokens] bool: the gradient is cut off there).
    """
    ratio = ratio_of(logp, old_logp)
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(unclipped, clipped)
    is_clipped = clipped > unclipped
    if dual is not None:
        bound = -advantage * dual
        over = (advantage < 0) & (loss > bound)
        loss = torch.where(over, bound, loss)
        is_clipped = is_clipped | over
    return loss, is_clipped


def gspo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, sequence: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """GSPO (arXiv 2507.18071), token form: the ratio is the geometric mean over the response, clipped per response.

    The value is the response's ratio at every token, the gradient flows through each token's own log-prob.
    """
    ratio = ratio_of(sequence_mean(logp - old_logp, sequence).detach(), torch.zeros_like(logp))
    token_ratio = ratio * (logp - logp.detach()).exp()
    unclipped = -advantage * token_ratio
    clipped = -advantage * token_ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def cispo(logp: Tensor, old_logp: Tensor, advantage: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE with a clipped, detached importance weight; no token loses its
    gradient.
    """
    ratio = ratio_of(logp.detach(), old_logp)
    weight = ratio.clamp(1 - low, 1 + high)
    return -advantage * weight * logp, weight != ratio


def k3_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """Schulman's k3 estimator of KL(policy ‖ reference) per token: exp(d) - d - 1, d = ref_logp - logp within ±10."""
    delta = (ref_logp - logp).clamp(-KL_CLAMP, KL_CLAMP)
    return delta.exp() - delta - 1


def token_weights(
    response_tokens: Tensor,
    trajectory_of_turn: Tensor,
    norm: Literal["token", "trajectory_mean", "constant"],
    trajectories: int = 0,
    response_limit: int = 0,
) -> Tensor:
    """Weight of each turn's tokens in the loss of one optimizer step.

    Args:
        response_tokens: [turns] int64, response tokens of every turn of the step, over all ranks.
        trajectory_of_turn: [turns] int64.
        norm: "token": 1 / all tokens (DAPO, arXiv 2503.14476). "trajectory_mean": every trajectory that has tokens
            weighs the same, so that long documents do not dominate. "constant": 1 / (trajectories · response_limit)
            (Dr. GRPO, arXiv 2503.20783), independent of what was sampled.
        trajectories: for "constant": how many were sampled, those without tokens here included.
        response_limit: for "constant": the most response tokens a trajectory may have, the same in every step.

    Returns:
        [turns] float64.
    """
    tokens = response_tokens.double()
    if norm == "token":
        return torch.full_like(tokens, 1.0 / max(float(tokens.sum()), 1.0))
    num_trajectories = int(trajectory_of_turn.max()) + 1 if len(trajectory_of_turn) else 0
    per_trajectory = torch.zeros(num_trajectories, dtype=torch.float64).index_add_(0, trajectory_of_turn, tokens)
    present = max(int((per_trajectory > 0).sum()), 1)
    if norm == "trajectory_mean":
        return 1.0 / (present * per_trajectory.clamp(min=1.0)[trajectory_of_turn])
    if response_limit < 1 or trajectories < 1:
        raise ValueError("norm 'constant' needs trajectories and response_limit, the most response tokens of each")
    return torch.full_like(tokens, 1.0 / (trajectories * response_limit))
