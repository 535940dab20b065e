"""Causal attention over rows laid end to end, by a flash kernel: no padding and no mask, on CUDA in 16-bit dtypes.

The kernel is PyTorch's own (`torch.nn.attention.varlen`, 2.10 and later), else flash-attn's where that is installed.
Which one it is, and whether it takes fewer key/value heads than query heads, is found out once, before anything is
compiled: PyTorch says so only since 2.13, while its kernel could do it before.
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

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """A kernel over (query, key, value [tokens, heads, d], ends of rows [rows + 1] int32, longest row, scale).

    grouped: it takes fewer key/value heads than query heads.
    """

    name: str
    run: Kernel
    grouped: bool


def usable(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether rows on that device can be attended to by a flash kernel."""
    if device.type != "cuda" or dtype not in HALF or head_size > LARGEST_HEAD or head_size % 8:
        return False
    return flash() is not None


_FOUND: list[Flash] = []
"""What `flash` found: compiled code reads it here, where nothing has to be traced."""


@functools.cache
def flash() -> Flash | None:
    """The kernel of this machine; None where there is none. Asked once before layers are compiled."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    if (kernel := _torchs()) is not None:
        return _keep(Flash("torch", kernel, _takes_groups(kernel)))
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found] # noqa: PLC0415 (optional)
    except ImportError:
        return None

    def run(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
        return flash_attn_varlen_func(query, key, value, ends, ends, longest, longest, softmax_scale=scale, causal=True)

    return _keep(Flash("flash-attn", run, True))


def _keep(kernel: Flash) -> Flash:
    _FOUND[:] = [kernel]
    return kernel


def attend(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
    """Attention of every row over its own past. query: [tokens, heads, d]; key, value: [tokens, kv_heads, d].

    Args:
        ends: [rows + 1] int32, where rows begin and end, 0 first. longest: at least the tokens of the longest row.
        scale: of the scores; None: 1/√d.

    Returns:
        [tokens, heads, d].

    """
    kernel = _FOUND[0] if _FOUND else flash()
    assert kernel is not None, "usable() was not asked"
    times = query.shape[1] // key.shape[1]
    if times > 1 and not kernel.grouped:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return kernel.run(query, key, value, ends, longest, scale)


def _torchs() -> Kernel | None:
    """PyTorch's kernel under one signature for the versions that have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (not in every version)
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # 2.10 says `is_causal`; later versions speak of the window that a query sees to its left and right.
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    scales = "scale" in known

    def run(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
        more: dict[str, Any] = {"scale": scale} if scales else {}
        return cast(Tensor, varlen_attn(query, key, value, ends, ends, longest, longest, **options, **more))

    return run


def _takes_groups(kernel: Kernel) -> bool:
    """Whether the kernel's values and gradients with two key/value heads are those with the heads repeated."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((96, 4, 64), (96, 2, 64), (96, 2, 64))
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for shape in shapes
    ]
    query, key, value = tensors
    ends = torch.tensor([0, 33, 96], device="cuda", dtype=torch.int32)
    try:
        with torch.enable_grad():
            short = kernel(query, key, value, ends, 64, None)
            long = kernel(query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), ends, 64, None)
            grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in (short, long)]
    except (RuntimeError, ValueError, TypeError):
        return False
    pairs = [(short, long), *zip(*grads, strict=True)]
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs)
