"""A stand-in for the GPU's flash kernel, in plain PyTorch on the CPU: the same arguments, the same values, slow."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.train import varlen
from trainer.train.layout import causal_band


def _edges(ends: Tensor, key_ends: Tensor) -> list[tuple[slice, slice]]:
    pairs = zip(itertools.pairwise(ends.tolist()), itertools.pairwise(key_ends.tolist()), strict=True)
    return [(slice(*queries), slice(*keys)) for queries, keys in pairs]


def _rows(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, scale: float, window: int | None
) -> Tensor:
    pieces = []
    for own, seen in _edges(ends, key_ends):
        q, k, v = query[own].transpose(0, 1)[None], key[seen].transpose(0, 1)[None], value[seen].transpose(0, 1)[None]
        band = causal_band(q.shape[2], k.shape[2], window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, band, scale=scale, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


@torch.library.custom_op("clusterkit_tests::rows", mutates_args=())
def rows(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    assert int(ends.diff().max()) <= longest
    assert int(ends[-1]) == len(query)
    assert int(key_ends.diff().max()) <= longest_keys
    assert int(key_ends[-1]) == len(key)
    return _rows(query, key, value, ends, key_ends, scale, window)


@rows.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
    scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    return torch.empty_like(query)


@torch.library.custom_op("clusterkit_tests::rows_backward", mutates_args=())
def rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found = [torch.zeros_like(x) for x in (query, key, value)]
    times = query.shape[1] // key.shape[1]
    for own, seen in _edges(ends, key_ends):
        # [heads, tokens, d]
        q, g = (x[own].transpose(0, 1).double() for x in (query, grad))
        k, v = (x[seen].transpose(0, 1).double().repeat_interleave(times, 0) for x in (key, value))
        hidden = ~causal_band(q.shape[1], k.shape[1], window, q.device)
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        back = g @ v.transpose(1, 2)
        scores = weights * (back - (back * weights).sum(-1, keepdim=True)) * scale
        parts = (scores @ k, scores.transpose(1, 2) @ q, weights.transpose(1, 2) @ g)
        for whole, place, part in zip(found, (own, seen, seen), parts, strict=True):
            groups = part.unflatten(0, (whole.shape[1], -1)).sum(1)
            whole[place] = groups.transpose(0, 1).to(whole.dtype)
    return found[0], found[1], found[2]


@rows_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, scale: float,
    window: int | None,
) -> Any:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ends, _, key_ends, _, scale, window = inputs
    ctx.save_for_backward(query, key, value, ends, key_ends)
    ctx.scale, ctx.window = scale, window


def _grads(ctx: Any, grad: Tensor) -> Any:
    return *rows_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window), *[None] * 6


torch.library.register_autograd("clusterkit_tests::rows", _grads, setup_context=_keep)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training attend to packed rows through this stand-in."""
    kernel = varlen.Flash("stand-in", rows, True, True, True)
    monkeypatch.setattr(varlen, "usable", lambda *_: True)
    monkeypatch.setattr(varlen, "flash", lambda: kernel)
