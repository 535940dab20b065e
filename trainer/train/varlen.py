"""Causal attention over rows laid end to end, by a flash kernel: no padding and no mask, on CUDA in 16-bit dtypes.

The kernel is PyTorch's own (`torch.nn.attention.varlen`, 2.10 and later), else flash-attn's where that is installed.
Which one it is, whether it takes fewer key/value heads than query heads, and whether it is right about a sliding window
is found out once, before anything is compiled: PyTorch speaks of heads only since 2.13, of windows since 2.11.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
# Longest rows are told to the kernel as multiples of this, so that compiled code is not made anew for every length.
LENGTH_STEP = 1024
# Of the trial whether a kernel knows windows.
WINDOW = 7

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys and values the rows see, where these are not their own tokens alone.

    index: [keys] int64, the tokens whose keys are laid end to end for the rows, a shared prefix once for each of them.
    ends: [rows + 1] int32, where each row's keys end, 0 first. longest: at least the keys of the row that sees most. A
    row's own tokens are the last of its keys.
    """

    index: Tensor
    ends: Tensor
    longest: int


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor, int, float | None, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """A kernel over (query [tokens, heads, d], key, value [keys, heads, d], ends of rows [rows + 1] int32, longest row,
    ends of their keys, most keys of a row, scale, window).

    grouped: it takes fewer key/value heads than query heads. windowed: it takes a sliding window. prefixed: a row's
    queries may be the last of its keys' tokens.
    """

    name: str
    run: Kernel
    grouped: bool
    windowed: bool
    prefixed: bool


def usable(
    device: torch.device, dtype: torch.dtype, head_size: int, windowed: bool = False, prefixed: bool = False
) -> bool:
    """Whether rows on that device can be attended to by a flash kernel, through sliding windows where `windowed`, after
    prefixes where `prefixed`.
    """
    if device.type != "cuda" or dtype not in HALF or head_size > LARGEST_HEAD or head_size % 8:
        return False
    kernel = flash()
    return kernel is not None and (kernel.windowed or not windowed) and (kernel.prefixed or not prefixed)


_FOUND: list[Flash] = []
"""What `flash` found: compiled code reads it here, where nothing has to be traced."""


@functools.cache
def flash() -> Flash | None:
    """The kernel of this machine; None where there is none. Asked once before layers are compiled."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    kernel, name = _torchs(), "torch"
    if kernel is None:
        kernel, name = _flash_attn(), "flash-attn"
    if kernel is None:
        return None
    return _keep(Flash(name, kernel, _takes_groups(kernel), _takes_windows(kernel), _takes_prefixes(kernel)))


def _keep(kernel: Flash) -> Flash:
    _FOUND[:] = [kernel]
    return kernel


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scale: float | None,
    window: int | None = None,
    keys: Keys | None = None,
) -> Tensor:
    """Attention of every row over its own past.

    Args:
        query: [tokens, heads, d].
        key: [tokens, kv_heads, d].
        value: [tokens, kv_heads, d].
        ends: [rows + 1] int32, where rows begin and end, 0 first.
        longest: at least the tokens of the longest row.
        scale: of the scores; None: 1/√d.
        window: keys that a query sees, itself among them; None: all of its past.
        keys: where rows see tokens of others before their own; None: their own alone.

    Returns:
        [tokens, heads, d].
    """
    kernel = _FOUND[0] if _FOUND else flash()
    assert kernel is not None, "usable() was not asked"
    key_ends, longest_keys = ends, longest
    if keys is not None:
        key, value = _laid_out(key, keys.index), _laid_out(value, keys.index)
        key_ends, longest_keys = keys.ends, keys.longest
    times = query.shape[1] // key.shape[1]
    if times > 1 and not kernel.grouped:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return kernel.run(query, key, value, ends, longest, key_ends, longest_keys, scale, window)


def _laid_out(values: Tensor, index: Tensor) -> Tensor:
    """values[index]; in the backward pass the gradients of a token are added up in float32, not rounded each time."""
    return values.float().index_select(0, index).to(values.dtype)


def _left(window: int | None) -> int:
    """What flash kernels call the left side of a window: keys before the query itself; -1 for all."""
    return -1 if window is None else window - 1


def _torchs() -> Kernel | None:
    """PyTorch's kernel under one signature for the versions that have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (not in every version)
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # 2.10 says `is_causal`; later versions speak of the window that a query sees to its left and right.
    windows, scales = "window_size" in known, "scale" in known
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}

    def run(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
        scale: float | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        if not windows and window is not None:
            raise ValueError("this PyTorch's varlen_attn knows no sliding window")
        if not scales and scale is not None and scale != query.shape[-1] ** -0.5:
            raise ValueError("this PyTorch's varlen_attn knows no scale of the scores")
        more: dict[str, Any] = {"scale": scale} if scales else {}
        more |= {"window_size": (_left(window), 0)} if windows else {"is_causal": True}
        return cast(Tensor, varlen_attn(query, key, value, ends, key_ends, longest, longest_keys, **options, **more))

    return run


def _flash_attn() -> Kernel | None:
    """flash-attn's kernel, where that package is installed."""
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found] # noqa: PLC0415 (optional)
    except ImportError:
        return None

    def run(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
        scale: float | None, window: int | None,
    ) -> Tensor:  # fmt: skip
        return flash_attn_varlen_func(
            query, key, value, ends, key_ends, longest, longest_keys,
            softmax_scale=scale, causal=True, window_size=(_left(window), 0 if window is not None else -1),
        )  # fmt: skip

    return run


def _takes_groups(kernel: Kernel) -> bool:
    """Whether the kernel's values and gradients with two key/value heads are those with the heads repeated."""

    def repeated(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        return _whole(kernel, query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), ends)

    return _agree(functools.partial(_whole, kernel), repeated, kv_heads=2)


def _takes_windows(kernel: Kernel) -> bool:
    """Whether the kernel's values and gradients under a window are those of scores that are written out."""

    def written_out(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        place = torch.arange(len(query), device=query.device)
        row = torch.bucketize(place, ends[1:], right=True)
        back = place[:, None] - place
        seen = (row[:, None] == row) & (back >= 0) & (back < WINDOW)
        scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.float()).to(query.dtype)

    return _agree(functools.partial(_whole, kernel, window=WINDOW), written_out, kv_heads=4)


def _takes_prefixes(kernel: Kernel) -> bool:
    """Whether queries that are the last of their keys' tokens give what they give within whole rows.

    The second of two rows is taken as 20 tokens and 43 that see them; the kernel has to align causality at the end.
    """

    def split(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
        ends = torch.tensor([0, 33, 53, 96], device="cuda", dtype=torch.int32)
        seen = torch.tensor([0, 33, 53, 116], device="cuda", dtype=torch.int32)
        index = torch.cat([torch.arange(53), torch.arange(33, 96)]).to("cuda")
        key, value = _laid_out(key, index), _laid_out(value, index)
        return kernel(query, key, value, ends, 64, seen, 64, None, None)

    return _agree(functools.partial(_whole, kernel), split, kv_heads=4)


def _whole(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, window: int | None = None
) -> Tensor:
    return kernel(query, key, value, ends, 64, ends, 64, None, window)


def _agree(one: Attention, other: Attention, kv_heads: int) -> bool:
    """Whether two ways of attending to two rows of 33 and 63 tokens give the same values and gradients."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((96, 4, 64), (96, kv_heads, 64), (96, kv_heads, 64))
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    query, key, value = tensors
    ends = torch.tensor([0, 33, 96], device="cuda", dtype=torch.int32)
    try:
        with torch.enable_grad():
            first, second = (way(query, key, value, ends) for way in (one, other))
            grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in (first, second)]
    except (RuntimeError, ValueError, TypeError):
        return False
    pairs = [(first, second), *zip(*grads, strict=True)]
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs)
