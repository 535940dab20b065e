"""Layout of a packed row: where its segments lie, and how attention is computed over them.

A segment is a run of tokens: a whole row, a prefix that rows share, or the rest of a row after its prefix.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.train import families, varlen

log = logging.getLogger("trainer")

# Smallest ratio of the shortest to the longest row of a block, which bounds the padding.
SIMILAR = 0.75
# The same ratio for groups of segments after a prefix, of three sizes: length of the prefix, length of the longest
# segment after it, number of segments after it.
SIMILAR_GROUPS = 0.6


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of similar length, padded to one rectangle."""

    index: Tensor  # [rows, length] positions in the packed row; padding points at the row's first token
    valid: Tensor  # [rows, length] bool, False for padding


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Groups of similar size, each a prefix and the segments after it, padded to one rectangle.

    Attributes:
        prefix: [groups, P] positions of the prefixes in the packed row; padding points at the prefix's first token.
        prefix_lengths: [groups] tokens of each prefix.
        index: [groups, segments, S] positions of the segments; padding points at the segment's first token.
        valid: [groups, segments, S] bool, False for padding.
    """

    prefix: Tensor
    prefix_lengths: Tensor
    index: Tensor
    valid: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Where the segments of a packed row lie. Segments follow each other without gaps.

    Attributes:
        prefixes: number of the segment that each one continues and attends to, -1 for none; a prefix continues none.
        ends: [segments + 1] int32, end of each segment in the packed row, 0 first.
        keyed: a flash kernel always gets the keys of every segment, also where no segment has a prefix. One
            compilation then serves all micro-batches of a run.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]
    device: torch.device
    ends: Tensor
    keyed: bool

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, prefixes: Sequence[int] | None = None) -> PackedLayout:
        """Make the layout of a packed row.

        Args:
            prefixes: see `PackedLayout.prefixes`; None where prefixes are not shared.
        """
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        before = (-1,) * len(lengths) if prefixes is None else tuple(prefixes)
        return cls(tuple(lengths), before, device, to_device(ends, device), prefixes is not None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(self.lengths)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """For every segment, the tokens of its prefix, and the tokens of its prefix and itself."""
        before = [self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes]
        return tuple((seen, seen + length) for seen, length in zip(before, self.lengths, strict=True))

    @property
    def longest(self) -> int:
        """Tokens of the longest segment, rounded up so that the number changes seldom (see varlen.LENGTH_STEP)."""
        return _stepped(max(self.lengths))

    @cached_property
    def keys(self) -> varlen.Keys | None:
        """The keys of every segment, for a flash kernel; None where prefixes are not shared."""
        if not self.keyed:
            return None
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        own = [np.arange(starts[i], starts[i + 1]) for i in range(len(self.lengths))]
        pieces = [piece for i, p in enumerate(self.prefixes) for piece in ((own[p], own[i]) if p >= 0 else (own[i],))]
        seen = [end for _, end in self.spans]
        ends = torch.tensor([0, *seen], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        index = torch.from_numpy(np.concatenate(pieces))
        return varlen.Keys(to_device(index, self.device), to_device(ends, self.device), _stepped(max(seen)))

    @cached_property
    def starts(self) -> list[int]:
        """Position of each segment's first token."""
        return [0, *itertools.accumulate(self.lengths)][:-1]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Attention blocks of the segments without a prefix; every segment is in one block."""
        alone = [i for i, prefix in enumerate(self.prefixes) if prefix < 0]
        order = sorted(alone, key=lambda i: (-self.lengths[i], i))
        blocks = []
        for members in _runs(order, lambda i, first: self.lengths[i] >= SIMILAR * self.lengths[first]):
            index, valid = self._positions(members)
            blocks.append(Block(index, valid))
        return tuple(blocks)

    @cached_property
    def shared_blocks(self) -> tuple[SharedBlock, ...]:
        """Attention blocks of the segments after a prefix; every segment is in one block."""
        following: dict[int, list[int]] = {}
        for i, prefix in enumerate(self.prefixes):
            if prefix >= 0:
                following.setdefault(prefix, []).append(i)
        sizes = {
            prefix: (self.lengths[prefix], max(self.lengths[i] for i in members), len(members))
            for prefix, members in following.items()
        }

        def similar(prefix: int, first: int) -> bool:
            return all(
                SIMILAR_GROUPS * max(pair) <= min(pair) for pair in zip(sizes[prefix], sizes[first], strict=True)
            )

        blocks = []
        for heads in _runs(sorted(following, key=lambda prefix: (*(-size for size in sizes[prefix]), prefix)), similar):
            most = max(sizes[head][2] for head in heads)
            # A group with fewer segments is filled up with copies of its first, which are all marked as padding.
            rows = [i for head in heads for i in (*following[head], *following[head][:1] * (most - sizes[head][2]))]
            real = torch.tensor([n < sizes[head][2] for head in heads for n in range(most)], device=self.device)
            index, valid = self._positions(rows)
            shape = (len(heads), most, index.shape[1])
            before, _ = self._positions(heads)
            lengths = torch.tensor([self.lengths[head] for head in heads], device=self.device)
            blocks.append(
                SharedBlock(before, lengths, index.view(shape), (valid & real[:, None]).view(shape)),
            )
        return tuple(blocks)

    def _positions(self, segments: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Positions of segments, padded to the longest, and which of them are no padding: both [segments, longest]."""
        lengths = torch.tensor([self.lengths[i] for i in segments], device=self.device)
        start = torch.tensor([self.starts[i] for i in segments], device=self.device)
        offsets = torch.arange(int(lengths.max()), device=self.device)
        valid = offsets[None, :] < lengths[:, None]
        return start[:, None] + torch.where(valid, offsets[None, :], 0), valid

    @cached_property
    def _masks(self) -> dict[tuple[int, int | None], Tensor]:
        return {}

    def band(self, length: int, window: int | None) -> Tensor:
        """Causal mask of a segment: [length, length] bool, True where a query may attend to a key.

        All layers of a pass share one tensor.

        Args:
            window: keys that a query attends to, its own included; None for all before it.
        """
        if (length, window) not in self._masks:
            self._masks[length, window] = causal_band(length, length, window, self.device)
        return self._masks[length, window]

    def shared_mask(self, number: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Mask of a shared block: [groups * segments, 1, S, P + S].

        All layers share one tensor, which is kept for their backward passes.

        Args:
            number: number of the block in `shared_blocks`.
            window: keys that a query attends to, its own included; None for all before it.
            dtype: bool: True where a query may attend to a key. A floating dtype: 0 there, -inf elsewhere.
        """
        if (-1 - number, window) not in self._masks:
            block = self.shared_blocks[number]
            most, length = block.prefix.shape[1], block.index.shape[2]
            ends = block.prefix_lengths[:, None, None]
            before = torch.arange(most, device=self.device)
            query = torch.arange(length, device=self.device)[:, None]
            seen = (before < ends).expand(-1, length, -1)
            if window is not None:
                seen = seen & (before > ends + query - window)
            own = causal_band(length, length, window, self.device).expand(len(block.prefix), -1, -1)
            mask = torch.cat([seen, own], 2)[:, None].repeat_interleave(block.index.shape[1], 0)
            if dtype != torch.bool:
                mask = torch.zeros(mask.shape, dtype=dtype, device=self.device).masked_fill_(~mask, -torch.inf)
            self._masks[-1 - number, window] = mask
        return self._masks[-1 - number, window]

    def arguments(self, dtype: torch.dtype, head_size: int, model: Any) -> dict[str, Any]:
        """Keyword arguments of a model's forward pass over this packed row."""
        capped, windowed = families.has_capped_attention(model), any(families.windows(model))
        if not capped and varlen.usable(self.device, dtype, head_size, windowed, self.keyed):
            found: dict[str, Any] = {"row_ends": self.ends, "longest_row": self.longest}
            if self.keys is not None:
                heads = (model.num_attention_heads, model.num_key_value_heads)
                varlen.find_faster(self.device, *heads, head_size)
                found |= {"key_index": self.keys.index, "key_ends": self.keys.ends, "longest_keys": self.keys.longest}
            return found
        return {"packed_layout": self}


def _stepped(tokens: int) -> int:
    """The next multiple of varlen.LENGTH_STEP."""
    return -(-tokens // varlen.LENGTH_STEP) * varlen.LENGTH_STEP


def _runs(order: Sequence[int], belongs: Callable[[int, int], bool]) -> Iterator[Sequence[int]]:
    """Cut a sequence into runs. belongs(item, first): whether an item belongs to the run that begins with first."""
    first = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or not belongs(order[end], order[first]):
            yield order[first:end]
            first = end


def keeps_kernel(lm: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a flash kernel takes rows with a shared prefix where one takes whole rows.

    They do not where the flash kernel does not align its causal mask at the end of the keys. Padded blocks would be
    left, which are slow on a GPU, so prefixes are not shared then, and main.log says so.
    """
    windowed, head_size = any(families.windows(lm.config)), lm.model.layers[0].self_attn.head_dim
    if families.has_capped_attention(lm.config) or not varlen.usable(device, dtype, head_size, windowed):
        return True
    if varlen.usable(device, dtype, head_size, windowed, True):
        return True
    log.warning("this flash kernel attends to whole rows only: train.share_prefixes has no effect")
    return False


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device without waiting for the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def causal_band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask of queries at the last positions of the keys: [queries, keys] bool, True where a query may attend.

    Args:
        window: keys that a query attends to, its own included; None for all before it.
    """
    key = torch.arange(keys, device=device)
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
