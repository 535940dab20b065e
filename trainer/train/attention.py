"""Attention over packed rows: many conversations in one row of tokens, none sees another.

The linear layers of a transformer run on the packed row, where no token is padding. Attention alone needs to know the
rows. On CUDA in 16-bit dtypes a flash kernel takes them as they lie (trainer/train/varlen.py). Elsewhere it is computed
on small padded blocks: rows of similar length are gathered into one [rows, length] block, causal SDPA runs on it, and
the result goes back to its place. The cost is Σ rows·length² instead of (Σ length)² for one block-diagonal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.train import varlen

IMPLEMENTATION = "clusterkit_packed"

# Rows go into one block while the shortest is at least this share of the longest: bounds the padding.
SIMILAR = 0.75


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
    def squares(self) -> int:
        """Σ length²: what causal attention costs, but for constants."""
        return sum(length * length for length in self.lengths)

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

    def arguments(self, dtype: torch.dtype, head_size: int) -> dict[str, Any]:
        """Keyword arguments for a model of ours whose attention is to see these rows."""
        if varlen.usable(self.device, dtype, head_size):
            return {"row_ends": self.ends, "longest_row": self.longest}
        return {"packed_layout": self}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for what the device is doing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def packed_attention(  # the signature is transformers'
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    row_ends: Tensor | None = None,
    longest_row: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers attention function. query: [batch, heads, queries, d]; key, value: [batch, kv_heads, keys, d].

    With `packed_layout`, or `row_ends` and `longest_row` for the flash kernel, the batch is one packed row; without,
    `attention_mask` ([batch, 1, queries, keys], True where a key may be seen) is applied as it is. Returns
    [batch, queries, heads, d] and no weights.
    """
    if dropout:
        raise ValueError("attention dropout is not supported: it would make the trained policy differ from the sampled")
    if row_ends is not None:
        queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
        return varlen.attend(queries, keys, values, row_ends, longest_row, scaling)[None], None
    if packed_layout is None:
        return _sdpa(query, key, value, attention_mask, False, scaling).transpose(1, 2), None
    return _blocks(query, key, value, packed_layout, scaling), None


@torch.compiler.disable  # type: ignore[untyped-decorator] # every batch has other blocks: compiled code would be made anew for each
def _blocks(query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None) -> Tensor:
    """Attention block by block. [1, heads, tokens, d] -> [1, tokens, heads, d]."""
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, d]
    pieces, places = [], []
    for block in layout.blocks:
        q, k, v = (x[block.index].transpose(1, 2) for x in (queries, keys, values))
        out = _sdpa(q, k, v, None, True, scaling)
        pieces.append(out.transpose(1, 2)[block.valid])
        places.append(block.index[block.valid])
    # Every position occurs exactly once, so the inverse permutation puts the pieces back without a scatter.
    restore = torch.argsort(torch.cat(places))
    return torch.cat(pieces)[restore][None]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scaling: float | None
) -> Tensor:
    """SDPA; in float64 where the model computes in float32 on a CPU.

    The CPU kernel's fast exponential is good to about 20 bits, which sharp attention turns into differences of 1e-4
    between sampled and trained log-probs; in float64 they stay near 2e-6. Attention is a small part of the time.
    """
    precise = query.dtype == torch.float32 and query.device.type == "cpu"
    if precise:
        query, key, value = query.double(), key.double(), value.double()
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=grouped
    )
    return out.float() if precise else out


def register() -> None:
    """Make the implementation known to transformers (idempotent)."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
