"""FlashAttention 4's backward pass on Hopper GPUs, for rows that may attend to a shared prefix: all rows of a run with
train.share_prefixes, in which one compilation serves every micro-batch.

The forward pass is PyTorch's kernel, as that of whole rows: it rounds a row's outputs alike wherever the row lies, so
log-probs hardly depend on what is shared (by 2e-8 in the mean at most, where it was measured). FlashAttention 4's own
forward pass rounds otherwise, and gradients of whole rows and of shared ones would be as far apart as two ways of
rounding are (docs/performance.md).

The package is flash-attn-4, which SGLang's environment has. Forward and backward are operations here that torch.compile
can hold. Kernels are compiled for a number and size of heads where they first run, in some seconds.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import warnings
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("trainer")

SWITCH = "CLUSTERKIT_FLASH4"
"""Environment variable: 0 leaves the kernel out."""
HOPPER = 9
NEEDED = frozenset({"return_aux", "scale", "window_size"})
"""Arguments of PyTorch's kernel that are used; it has them from 2.11 on."""
HEADS = (128,)
"""Sizes of a head that it is taken for. Models with heads of 64 are so small that its compilation costs more than it
gains."""


def available() -> bool:
    """Whether this GPU is a Hopper, PyTorch's kernel tells what the backward pass needs, and the package is there.

    main.log says what is missing on a Hopper.
    """
    if os.environ.get(SWITCH) == "0" or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability()[0] != HOPPER:
        return False
    try:
        if missing := NEEDED - _known():
            raise ModuleNotFoundError(f"this PyTorch's varlen_attn has no {', '.join(sorted(missing))}")
        _package()
    except ModuleNotFoundError as error:
        log.info("attention of rows that share a prefix: without FlashAttention 4 (%s)", error)
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
        raise ValueError("this kernel is called for whole prefixes only")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _forward(query, key, value, ends, key_ends, longest, longest_keys, scale)[0]


@functools.cache
def _package() -> Any:
    # Its compiler warns of every kernel's arguments.
    warnings.filterwarnings("ignore", module=r"cutlass(\.|$)")
    return importlib.import_module("flash_attn.cute.interface")


@functools.cache
def _known() -> frozenset[str]:
    """Arguments of PyTorch's kernel in this version."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (not in every version)
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, key_ends: Tensor, longest_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What PyTorch's kernel returns, and the log-sum-exp of the scores, [heads, tokens] float32."""
    times = query.shape[1] // key.shape[1]
    if times > 1 and not takes_groups(query.device, times):
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    out, sums = _attend(query, key, value, ends, key_ends, longest, longest_keys, scale)
    # Its documentation has the sums the other way round; should they ever be, `varlen.find_faster` sees it.
    return out.contiguous(), sums.contiguous()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from torch.nn.attention.varlen import AuxRequest, varlen_attn  # noqa: PLC0415 (not in every version)

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "return_aux": AuxRequest(lse=True)}
    if "enable_gqa" in _known():
        options["enable_gqa"] = True
    out, sums = varlen_attn(query, key, value, ends, key_ends, longest, longest_keys, **options)
    return out, sums


@functools.cache
def takes_groups(device: torch.device, times: int) -> bool:
    """Whether PyTorch's forward pass takes one head of keys for so many of queries.

    Since 2.13 it does if asked to, and whole rows have them so, too. 2.11's does unasked, to the bits of repeated ones,
    as whole rows have them there; its backward pass, not used here, does not. Repeating them takes 15 to 33 % of both
    together. main.log says where it does not.
    """
    if "enable_gqa" in _known():
        return True
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn((tokens, heads, HEADS[0]), generator=generator, device=device, dtype=torch.bfloat16)
        for tokens, heads in ((500, 2 * times), (700, 2), (700, 2))
    )
    # The second row's queries are the last 300 of its 500 keys: several tiles, and more keys than queries.
    ends, key_ends = (torch.tensor(e, device=device, dtype=torch.int32) for e in ([0, 200, 500], [0, 200, 700]))
    keys, values = (t.repeat_interleave(times, 1) for t in (key, value))
    try:
        found = _attend(query, key, value, ends, key_ends, 300, 500, 0.1)
        expected = _attend(query, keys, values, ends, key_ends, 300, 500, 0.1)
        same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        fault = "" if same else "gives other numbers for them"
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        fault = f"refuses them ({type(error).__name__}: {error})"[:300]
    if fault:
        log.info("attention of rows that share a prefix: heads of keys are repeated, since PyTorch's kernel %s", fault)
    return not fault


@torch.library.custom_op("clusterkit::flash4", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, longest: int, longest_keys: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attention(query, key, value, ends, longest, key_ends, longest_keys, scale)


@_forward.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query, memory_format=torch.contiguous_format), sums


@torch.library.custom_op("clusterkit::flash4_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, ends: Tensor, key_ends: Tensor,
    longest: int, longest_keys: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows = {"cu_seqlens_q": ends, "cu_seqlens_k": key_ends, "max_seqlen_q": longest, "max_seqlen_k": longest_keys}
    # causal: queries are the last of the keys' positions
    options = {**rows, "softmax_scale": scale, "causal": True}
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
