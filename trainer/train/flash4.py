"""FlashAttention 4 on Hopper GPUs, for rows that attend to a shared prefix, as operations that torch.compile can hold.

The package is flash-attn-4, which SGLang's environment has. Its own autograd function is none that compiled layers can
hold, so forward and backward are operations here. Kernels are compiled for a number and size of heads where they first
run, in some seconds.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("trainer")

SWITCH = "CLUSTERKIT_FLASH4"
"""Environment variable: 0 leaves these kernels out."""
HOPPER = 9
HEADS = (128,)
"""Sizes of a head that it is taken for. Models with heads of 64 are so small that its compilation costs more than it
gains."""


def available() -> bool:
    """Whether this GPU is a Hopper, and the package is there and can be imported."""
    if os.environ.get(SWITCH) == "0" or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    try:
        _package()
    except ModuleNotFoundError:
        return False
    except Exception as error:  # it loads a compiler and its libraries, which fail in ways of their own
        log.warning("FlashAttention 4 cannot be imported, and is left out (%s: %s)", type(error).__name__, error)
        return False
    return True


def run(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
    scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    """See `varlen.Flash.run`; key and value may have fewer heads than query. Raises ValueError for a window."""
    if window is not None:
        raise ValueError("these kernels are called for whole prefixes only")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _forward(query, key, value, ends, key_ends, longest, longest_keys, scale)[0]


@functools.cache
def _package() -> Any:
    # Its compiler warns of every kernel's arguments.
    warnings.filterwarnings("ignore", module=r"cutlass(\.|$)")
    return importlib.import_module("flash_attn.cute.interface")


def _options(ends: Tensor, key_ends: Tensor, longest: int, longest_keys: int, scale: float) -> dict[str, Any]:
    rows = {"cu_seqlens_q": ends, "cu_seqlens_k": key_ends, "max_seqlen_q": longest, "max_seqlen_k": longest_keys}
    return {**rows, "softmax_scale": scale, "causal": True}  # causal: queries are the last of the keys' positions


@torch.library.custom_op("clusterkit::flash4", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = _options(ends, key_ends, longest, longest_keys, scale)
    out, sums = _package()._flash_attn_fwd(query, key, value, return_lse=True, **options)[:2]
    return out, sums.contiguous()


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), sums


@torch.library.custom_op("clusterkit::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, ends: Tensor, key_ends: Tensor,
    longest: int, longest_keys: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = _options(ends, key_ends, longest, longest_keys, scale)
    found = _package()._flash_attn_bwd(query, key, value, out, grad.contiguous(), sums, **options)
    return found[0], found[1], found[2]


@_backward.register_fake
def _(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ends, key_ends, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, ends, key_ends)


def _grads(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, *ctx.numbers)
    return *grads, None, None, None, None, None


_forward.register_autograd(_grads, setup_context=_keep)
