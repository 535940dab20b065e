"""The feed-forward part of a layer for some of its tokens at a time.

What it holds between its matrices is five times as wide as a layer's input, and with a long row the most of all that a
recomputed layer takes. Tokens do not meet there, so pieces give the same values; gradients of the weights are summed in
float32. In the backward pass each piece is computed once more, and the enclosing checkpoint's recomputation ends where
this begins: a layer that ends with its feed-forward part is computed as often as with whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 4096
"""Most tokens of a piece: a GPU is busy with as many, and a 7B model's take 1.2 GB."""

Part = Callable[[Tensor], Tensor]


def by_chunks(module: nn.Module, part: Part) -> Part:
    """Make the forward pass of a feed-forward module one over pieces of [1, tokens, width]; others stay whole.

    Args:
        module: whose weights get gradients.
        part: its own forward pass.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator] # the number of pieces differs from batch to batch
    def forward(hidden: Tensor) -> Tensor:
        if len(hidden) != 1 or hidden.shape[1] <= CHUNK:
            return part(hidden)
        if not torch.is_grad_enabled():
            return torch.cat([part(hidden[:, some]) for some in _pieces(hidden)], 1)
        if not hidden.requires_grad:  # nothing before it learns; there must be something to keep it by
            hidden = hidden.detach().requires_grad_()
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        return _Compute.apply(part, _Keep.apply(part, hidden, *weights))

    return forward


def _pieces(hidden: Tensor) -> Iterator[slice]:
    """Pieces of almost one length."""
    tokens = hidden.shape[1]
    length = -(-tokens // -(-tokens // CHUNK))
    for start in range(0, tokens, length):
        yield slice(start, start + length)


class _Keep(torch.autograd.Function):
    """What a part learns. Forward it saves the part's input, before anything is computed from it, and passes it on;
    backward it is given the gradient of the part's output, which has the input's shape.
    """

    @staticmethod
    def forward(ctx: Any, part: Part, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.part, ctx.weights = part, weights
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (hidden,) = ctx.saved_tensors
        inward, sums = torch.empty_like(hidden), list[Tensor]()
        for some in _pieces(hidden):
            with torch.enable_grad():
                piece = hidden[:, some].detach().requires_grad_()
                out = ctx.part(piece)
            inward[:, some], *found = torch.autograd.grad(out, [piece, *ctx.weights], grads[0][:, some])
            if sums:
                for total, more in zip(sums, found, strict=True):
                    total.add_(more)
            else:
                sums = [one.float() for one in found]
        return None, inward, *(one.to(weight.dtype) for one, weight in zip(sums, ctx.weights, strict=True))


class _Compute(torch.autograd.Function):
    """A part piece by piece. It saves nothing and hands its gradient to the `_Keep` before it, which has the input."""

    @staticmethod
    def forward(_ctx: Any, part: Part, hidden: Tensor) -> Tensor:
        return torch.cat([part(hidden[:, some]) for some in _pieces(hidden)], 1)

    @staticmethod
    def backward(_ctx: Any, *grads: Any) -> Any:
        return None, grads[0]
