"""Causal attention over packed rows with a flash kernel: no padding and no mask. Needs CUDA and a 16-bit dtype.

The kernel is PyTorch's (`torch.nn.attention.varlen`, from 2.10 on), otherwise flash-attn's where that is installed.
PyTorch's has options for grouped heads only from 2.13 on, and for sliding windows from 2.11 on. So `flash` tries once,
before anything is compiled, what the kernel at hand computes correctly. With train.share_prefixes the backward pass is
FlashAttention 4's (trainer/train/flash4.py) where that is at hand and right, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from trainer.train import flash4

log = logging.getLogger("trainer")

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
FLASH_ATTN = "flash-attn"
# The longest row's length is rounded up to a multiple of this, so that few lengths are compiled for.
LENGTH_STEP = 1024
# Window of the test whether a kernel supports sliding windows.
WINDOW = 7
# Of two kernels that are right, over the norm: bfloat16's rounding puts outputs and gradients 0.002 to 0.003 apart.
MOST_APART = 0.02

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys and values that each row attends to, where rows attend to a shared prefix. A row's own come last.

    Attributes:
        index: [keys] int64, the tokens whose keys the rows attend to, row by row; a shared prefix once for each row.
        ends: [rows + 1] int32, end of each row's keys in `index`, 0 first.
        longest: upper bound of one row's keys.
    """

    index: Tensor
    ends: Tensor
    longest: int


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor, int, float | None, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class Flash:
    """A flash kernel.

    Attributes:
        name: the package that it comes from.
        run: called with query [tokens, heads, d], key and value [keys, heads, d], ends of the rows [rows + 1] int32,
            tokens of the longest row, ends of the rows' keys [rows + 1] int32, most keys of a row, scale, window.
        grouped: supports fewer key/value heads than query heads.
        windowed: supports a sliding window.
        prefixed: supports rows with more keys than queries, the queries being at the last positions.
    """

    name: str
    run: Kernel
    grouped: bool
    windowed: bool
    prefixed: bool


def usable(
    device: torch.device, dtype: torch.dtype, head_size: int, windowed: bool = False, prefixed: bool = False
) -> bool:
    """Whether there is a flash kernel for packed rows. prefixed: rows attend to a shared prefix."""
    if device.type != "cuda" or dtype not in HALF or head_size > LARGEST_HEAD or head_size % 8:
        return False
    kernel = flash()
    return kernel is not None and (kernel.windowed or not windowed) and (kernel.prefixed or not prefixed)


_FOUND: list[Flash] = []
"""The result of `flash`, for compiled code, which would otherwise trace that function."""
_FASTER: dict[tuple[int, int], Kernel | None] = {}
"""What `find_faster` found, by query heads to a key/value head and size of a head, for the same reason."""


@functools.cache
def flash() -> Flash | None:
    """The kernel of this machine, or None. Call it before layers are compiled."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        return None
    kernel, name = _torchs(), "torch"
    if kernel is None:
        kernel, name = _flash_attn(), FLASH_ATTN
    if kernel is None:
        return None
    return _keep(Flash(name, kernel, _takes_groups(kernel), _takes_windows(kernel), _takes_prefixes(kernel)))


def find_faster(device: torch.device, heads: int, kv_heads: int, head_size: int) -> None:
    """Look once for a faster backward pass of rows that attend to a shared prefix, which `attend` then takes for them.

    Call it before layers are compiled for such rows. It compiles that kernel for these heads, in some seconds, and
    takes it if outputs and gradients are those of the kernel for whole rows. main.log says which it is.
    """
    times, kernel = heads // kv_heads, flash()
    if kernel is None or (times, head_size) in _FASTER:
        return
    _FASTER[times, head_size] = None
    # Its forward pass is PyTorch's kernel: that of whole rows must be no other.
    if head_size not in flash4.HEADS or kernel.name == FLASH_ATTN or not flash4.available():
        return
    try:
        apart = _apart(kernel.run, flash4.run, device, heads, kv_heads, head_size)
        fault = "" if apart <= MOST_APART else f"differs from the other kernel by {apart:.3f} of its norm"
    except Exception as error:  # it is compiled here, which fails in ways of its compiler's own
        fault = f"failed with {type(error).__name__}: {error}"[:500]
    if fault:
        log.warning("FlashAttention 4 is left out, rows that share a prefix are trained more slowly: it %s", fault)
    else:
        _FASTER[times, head_size] = flash4.run
        log.info("attention of rows that share a prefix: backward pass by FlashAttention 4")


def has_faster() -> bool:
    """Whether `find_faster` has found one for some model's heads."""
    return any(kernel is not None for kernel in _FASTER.values())


def _apart(one: Kernel, other: Kernel, device: torch.device, heads: int, kv_heads: int, size: int) -> float:
    """How far outputs and gradients of two kernels are apart, over their norms, the largest of them.

    one gets two whole rows with as many key/value heads as query heads, other the second row cut into 300 tokens and
    200 that attend to them, with grouped heads: several tiles of keys, and more keys than queries.
    """
    generator = torch.Generator(device).manual_seed(0)
    tensors = [
        torch.randn((700, n, size), generator=generator, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    query, key, value = tensors
    whole, cut, seen = (
        torch.tensor(ends, device=device, dtype=torch.int32)
        for ends in ([0, 200, 700], [0, 200, 500, 700], [0, 200, 500, 1000])
    )
    index = torch.cat([torch.arange(500), torch.arange(200, 700)]).to(device)
    times = heads // kv_heads
    with torch.enable_grad():
        keys, values = (t.float().repeat_interleave(times, 1).to(t.dtype) for t in (key, value))
        first = one(query, keys, values, whole, LENGTH_STEP, whole, LENGTH_STEP, size**-0.5, None)
        keys, values = _laid_out(key, index), _laid_out(value, index)
        second = other(query, keys, values, cut, LENGTH_STEP, seen, LENGTH_STEP, size**-0.5, None)
        grads = [torch.autograd.grad(out.float().square().sum(), tensors) for out in (first, second)]
    pairs = [(first, second), *zip(*grads, strict=True)]
    return float(torch.stack([(b - a).detach().float().norm() / a.detach().float().norm() for a, b in pairs]).max())


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
        ends: [rows + 1] int32, end of each row, 0 first.
        longest: upper bound of one row's tokens.
        scale: factor of the scores; None for 1/√d.
        window: keys that a query attends to, its own included; None for all before it.
        keys: the keys of rows that attend to a shared prefix; None where rows attend to themselves only.

    Returns:
        [tokens, heads, d].
    """
    kernel = _FOUND[0] if _FOUND else flash()
    assert kernel is not None, "usable() was not asked"
    key_ends, longest_keys = ends, longest
    run, grouped, times = kernel.run, kernel.grouped, query.shape[1] // key.shape[1]
    if keys is not None:
        key, value = _laid_out(key, keys.index), _laid_out(value, keys.index)
        key_ends, longest_keys = keys.ends, keys.longest
        if window is None and (faster := _FASTER.get((times, query.shape[-1]))) is not None:
            run, grouped = faster, True
    if times > 1 and not grouped:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return run(query, key, value, ends, longest, key_ends, longest_keys, scale, window)


def _laid_out(values: Tensor, index: Tensor) -> Tensor:
    """values[index], with the gradients of a token that is repeated summed in float32 in the backward pass."""
    return values.float().index_select(0, index).to(values.dtype)


def _left(window: int | None) -> int:
    """A window as flash kernels count it: keys before the query's own; -1 for all."""
    return -1 if window is None else window - 1


def _torchs() -> Kernel | None:
    """PyTorch's kernel with the signature of `Flash.run`; None in versions without it."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (not in every version)
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    # 2.10 has `is_causal`; later versions have `window_size`, the keys to the left and right of the query.
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
    """flash-attn's kernel with the signature of `Flash.run`; None where that package is not installed."""
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
    """Whether the kernel gives the same values and gradients for two key/value heads as for four repeated ones."""

    def repeated(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
        return _whole(kernel, query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), ends)

    return _agree(functools.partial(_whole, kernel), repeated, kv_heads=2)


def _takes_windows(kernel: Kernel) -> bool:
    """Whether the kernel gives the same values and gradients with a window as plain attention with a mask."""

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
    """Whether the kernel aligns its causal mask at the end of the keys, so that queries may follow a prefix.

    The second of two rows is split into 20 tokens and 43 that attend to them, and compared with the whole row.
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
    """Whether two functions give the same values and gradients for two rows of 33 and 63 tokens."""
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
