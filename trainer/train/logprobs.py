"""Log-probs at loss positions only, in chunks: a [tokens, vocabulary] tensor never exists.

A memory agent's rows are mostly prompt: only about 7 % of their tokens carry loss, so the output layer runs on those
positions alone. Within them, logits of one chunk at a time are made, and made again in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.train import layers
from trainer.train.families import capped
from trainer.train.packing import PackedBatch


class _WideScores(torch.autograd.Function):
    """Scores of a 16-bit output layer in float32: products of bfloat16 numbers are summed and kept without rounding to
    bfloat16, whose steps at a score of 20 are 0.06 or more. Engines do the same (SGLang: --enable-fp32-lm-head).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        """[tokens, width], [vocabulary, width] -> [tokens, vocabulary] float32."""
        ctx.save_for_backward(hidden, weight)
        if hidden.device.type == "cuda":
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None]:
        """Gradients in the layer's own dtype, summed in float32 by the matrix product; the weight's where it learns."""
        hidden, weight = ctx.saved_tensors
        grad = grads[0].to(weight.dtype)
        return grad @ weight, grad.t() @ hidden if ctx.needs_input_grad[1] else None


def _scores(hidden: Tensor, lm: Any) -> Tensor:
    """Logits in float32 [tokens, vocabulary] of hidden states [tokens, width]."""
    head = lm.lm_head
    if head.weight.dtype == torch.float32:
        return capped(head(hidden).float(), lm.config)
    return capped(_WideScores.apply(hidden, head.weight), lm.config)


def _logprobs(scores: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy, [tokens], of scores [tokens, vocabulary] and temperature [], all float32."""
    logits = scores / temperature
    normaliser = logits.logsumexp(-1)
    logp = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.no_grad():
        # A score of -inf (a token that the model forbids) has probability 0 and no part in the entropy.
        finite = logits.clamp(min=torch.finfo(logits.dtype).min)
        entropy = normaliser - (logits.softmax(-1) * finite).sum(-1)
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

    def __init__(self, lm: Any, compiled: bool = False) -> None:
        """compiled: passes over the scores are fused (torch.compile); unfused they read and write [tokens, vocabulary]
        numbers some fifteen times, which shows where rows share their prefixes and loss positions are dense.
        """
        super().__init__()
        self.lm = lm
        self._logprobs = torch.compile(_logprobs, dynamic=True, backend=layers.BACKEND) if compiled else _logprobs

    def forward(self, batch: PackedBatch, temperature: float, chunk: int, own: bool = False) -> tuple[Tensor, Tensor]:
        """See `token_logprobs`. own: by the model's own forward pass and attention, of a batch of one row; all its
        logits exist at once.
        """
        if own:
            return self._own(batch, temperature)
        first = self.lm.model.layers[0].self_attn
        hidden = self.lm.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **batch.layout.arguments(self.lm.lm_head.weight.dtype, first.head_dim, self.lm.config),
        ).last_hidden_state[0]
        hidden = hidden[batch.loss_index]
        pieces = []
        for start in range(0, len(hidden), chunk):
            piece = (hidden[start : start + chunk], batch.targets[start : start + chunk], temperature)
            if torch.is_grad_enabled() and len(hidden) > chunk:
                pieces.append(checkpoint(self._chunk, *piece, use_reentrant=False))
            else:
                pieces.append(self._chunk(*piece))
        logp, entropy = torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])
        return logp[batch.expand], entropy[batch.expand]

    def _chunk(self, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        scores = _scores(hidden, self.lm)
        # A number would be an input on the CPU, for which the compiler makes C++ code beside the GPU's: a minute.
        divisor = torch.full((), temperature, dtype=scores.dtype, device=scores.device)
        return self._logprobs(scores, targets, divisor)

    def _own(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]:
        config = self.lm.config
        ours = config._attn_implementation
        config._attn_implementation = "sdpa" if self.lm._supports_sdpa else "eager"
        try:
            found = self.lm(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.loss_index,
            )
        finally:
            config._attn_implementation = ours
        logp = torch.log_softmax(found.logits[0].float() / temperature, -1)
        return logp.gather(-1, batch.targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
