"""Log-probs at loss positions only, in chunks: a [tokens, vocabulary] tensor never exists.

A memory agent's rows are mostly prompt: only about 7 % of their tokens carry loss, so the output layer runs on those
positions alone. Within them, logits of one chunk at a time are made, and made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.train.packing import PackedBatch


def _chunk_logprobs(hidden: Tensor, head: Any, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.no_grad():
        entropy = normaliser - (logits.softmax(-1) * logits).sum(-1)
    return logp, entropy


def token_logprobs(
    model: nn.Module, batch: PackedBatch, temperature: float, chunk: int = 4096
) -> tuple[Tensor, Tensor]:
    """Log-prob of every trained token under the model, and the entropy of its distribution.

    Args:
        model: a `PolicyModel` (or its FSDP2 form); batch: what `pack` made; temperature: that of the sampling;
            chunk: loss positions whose logits exist at a time.

    Returns:
        (logp [M] float32 with gradient, entropy [M] float32 in nats without).

    """
    return model(batch, temperature, chunk)


class PolicyModel(nn.Module):
    """A transformers causal LM whose forward pass yields log-probs of a packed batch.

    Wrapping the whole computation in one forward lets FSDP2 gather the embedding and output weights around it.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: PackedBatch, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`."""
        hidden = self.lm.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            packed_layout=batch.layout,
        ).last_hidden_state[0]
        hidden = hidden[batch.loss_index]
        pieces = []
        for start in range(0, len(hidden), chunk):
            piece = (hidden[start : start + chunk], self.lm.lm_head, batch.targets[start : start + chunk], temperature)
            if torch.is_grad_enabled() and len(hidden) > chunk:
                pieces.append(checkpoint(_chunk_logprobs, *piece, use_reentrant=False))
            else:
                pieces.append(_chunk_logprobs(*piece))
        logp, entropy = torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
        return logp[batch.expand], entropy[batch.expand]
