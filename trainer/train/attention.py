"""Attention over packed rows: many conversations in one row of tokens, none sees another.

The linear layers of a transformer run on the packed row, where no token is padding. Attention alone needs to know the
rows. On CUDA in 16-bit dtypes a flash kernel takes them as they lie (trainer/train/varlen.py). Elsewhere it is computed
on small padded blocks: rows of similar length are gathered into one [rows, length] block, causal SDPA runs on it, and
the result goes back to its place. The cost is Σ rows·length² instead of (Σ length)² for one block-diagonal mask.

A layer with a sliding window of W sees, from position i, the keys i - W + 1 … i, as in transformers. Capped scores
(Gemma 2) are computed by the blocks on every device: no flash kernel that we use knows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.errors import UserError
from trainer.train import families, varlen

IMPLEMENTATION = "clusterkit_packed"

# Rows go into one block while the shortest is at least this share of the longest: bounds the padding.
SIMILAR = 0.75
# Capped scores exist for so many queries at a time.
CAPPED_QUERIES = 512
# What transformers passes on and what changes no result here: positions are in the rotated queries and keys already.
HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "is_causal"})


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length. index: [rows, length] positions in the packed row, padding points at position 0 of the
    row itself; valid: [rows, length] bool.
    """

    index: Tensor
    valid: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Where the rows lie in a packed row of tokens. lengths: of the rows, in tokens, laid end to end. ends: [rows + 1]
    int32 on the device, 0 first.
    """

    lengths: tuple[int, ...]
    device: torch.device
    ends: Tensor

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> PackedLayout:
        """Layout of rows of the given lengths (tokens), laid end to end."""
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), device, to_device(ends, device))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """An upper bound of the longest row's tokens that changes seldom (see varlen.LENGTH_STEP)."""
        step = varlen.LENGTH_STEP
        return -(-max(self.lengths) // step) * step

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Attention blocks that cover all positions once."""
        lengths, device = self.lengths, self.device
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        blocks: list[Block] = []
        position = 0
        while position < len(order):
            longest = lengths[order[position]]
            end = position
            while end < len(order) and lengths[order[end]] >= SIMILAR * longest:
                end += 1
            members = order[position:end]
            offsets = torch.arange(longest, device=device)
            member_lengths = torch.tensor([lengths[i] for i in members], device=device)
            valid = offsets[None, :] < member_lengths[:, None]
            start = torch.tensor([starts[i] for i in members], device=device)
            index = start[:, None] + torch.where(valid, offsets[None, :], 0)
            blocks.append(Block(index, valid))
            position = end
        return tuple(blocks)

    @cached_property
    def _bands(self) -> dict[tuple[int, int | None], Tensor]:
        return {}

    def band(self, length: int, window: int | None) -> Tensor:
        """[length, length] bool, True where a query may see a key: its own past, the last `window` positions of it.

        One tensor for all layers of a pass.
        """
        if (length, window) not in self._bands:
            self._bands[length, window] = causal_band(length, length, window, self.device)
        return self._bands[length, window]

    def arguments(self, dtype: torch.dtype, head_size: int, model: Any) -> dict[str, Any]:
        """Keyword arguments for a model of ours whose attention is to see these rows. model: its configuration."""
        capped, windowed = families.has_capped_attention(model), any(families.windows(model))
        if not capped and varlen.usable(self.device, dtype, head_size, windowed):
            return {"row_ends": self.ends, "longest_row": self.longest}
        return {"packed_layout": self}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device is doing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def causal_band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys] bool, True where a query may see a key. The queries are the last of the keys' positions."""
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def packed_attention(  # the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_layout: PackedLayout | None = None,
    row_ends: Tensor | None = None,
    longest_row: int = 0,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers attention function. query: [batch, heads, queries, d]; key, value: [batch, kv_heads, keys, d].

    With `packed_layout`, or `row_ends` and `longest_row` for the flash kernel, the batch is one packed row; without,
    `attention_mask` ([batch, 1, queries, keys], True where a key may be seen) is applied, and the queries are the last
    of the keys' positions. Returns [batch, queries, heads, d] and no weights.

    Args:
        sliding_window: keys that a query sees, itself among them; None: all of its past.
        softcap: scores become softcap·tanh(score / softcap); None: they stay as they are.

    Raises:
        UserError: transformers asks for something that is not computed here.

    """
    _refuse_unknown(module, others)
    if dropout:
        raise ValueError("attention dropout is not supported: it would make the trained policy differ from the sampled")
    if row_ends is not None:
        if softcap is not None:
            raise ValueError("the flash kernel does not cap scores")
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
        return varlen.attend(queries, keys, values, row_ends, longest_row, scaling, sliding_window)[None], None
    if packed_layout is not None:
        return _blocks(query, key, value, packed_layout, scaling, sliding_window, softcap), None
    if attention_mask is None:
        raise ValueError("attention needs packed rows or a mask: else tokens would see what comes after them")
    if sliding_window is not None and key.shape[2] > sliding_window:
        attention_mask = attention_mask & causal_band(query.shape[2], key.shape[2], sliding_window, query.device)
    return _attend(query, key, value, attention_mask, scaling, softcap).transpose(1, 2), None


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    """Raise UserError for a keyword that may change the result and is not known here; none is passed over."""
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UserError(f"{type(module).__name__} sees what comes after a token: train a causal language model")
    unknown = [n for n, value in others.items() if n not in HARMLESS and value is not None and value is not False]
    if unknown:
        raise UserError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not computed here: log-probs "
            "would be wrong. Use another model, or the release of transformers that the images have"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator] # every batch has other blocks: compiled code would be made anew for each
def _blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention block by block. [1, heads, tokens, d] -> [1, tokens, heads, d]."""
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
    pieces, places = [], []
    for block in layout.blocks:
        q, k, v = (x[block.index].transpose(1, 2) for x in (queries, keys, values))
        length = block.index.shape[1]
        narrow = window if window is not None and window < length else None
        mask = layout.band(length, narrow) if narrow is not None or softcap is not None else None
        out = _attend(q, k, v, mask, scaling, softcap)
        pieces.append(out.transpose(1, 2)[block.valid])
        places.append(block.index[block.valid])
    # Every position occurs exactly once, so the inverse permutation puts the pieces back without a scatter.
    restore = torch.argsort(torch.cat(places))
    return torch.cat(pieces)[restore][None]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, softcap: float | None
) -> Tensor:
    """Attention under a mask, causal without one; in float64 where the model computes in float32 on a CPU.

    The CPU kernel's fast exponential is good to about 20 bits, which sharp attention turns into differences of 1e-4
    between sampled and trained log-probs; in float64 they stay near 2e-6. Attention is a small part of the time.
    """
    precise = query.dtype == torch.float32 and query.device.type == "cpu"
    if precise:
        query, key, value = query.double(), key.double(), value.double()
    if softcap is not None:
        assert mask is not None
        out = _capped(query, key, value, mask, scaling, softcap)
    else:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
    return out.float() if precise else out


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float) -> Tensor:
    """Attention with capped scores (Gemma 2, arXiv 2408.00118, 2.2), some queries at a time, made again in the backward
    pass. mask: [..., queries, keys] bool. [batch, heads, queries, d] -> the same.
    """
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def part(queries: Tensor, seen: Tensor) -> Tensor:
        scores = softcap * torch.tanh(queries @ key.transpose(2, 3) * (scale / softcap))
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide)
        return weights.to(value.dtype) @ value

    pieces = []
    for start in range(0, query.shape[2], CAPPED_QUERIES):
        some = slice(start, start + CAPPED_QUERIES)
        queries, seen = query[:, :, some], mask[..., some, :]
        pieces.append(
            checkpoint(part, queries, seen, use_reentrant=False) if torch.is_grad_enabled() else part(queries, seen)
        )
    return torch.cat(pieces, 2)


def register() -> None:
    """Make the implementation known to transformers (idempotent)."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
