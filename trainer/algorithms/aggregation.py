"""How token losses become one number: a weight per token that sums over all ranks and micro-batches of a step.

Because the weight is fixed before the batch is split, the gradient does not depend on how rows are spread over ranks,
micro-batches or positions, and rows of weight 0 change nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


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
