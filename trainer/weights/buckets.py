"""Tensors laid end to end in buckets of bytes: one transfer instead of hundreds.

The layout is that of SGLang's `flattened_bucket`: every tensor's bytes after those of the one before, no gaps, so that
names, dtypes and shapes in order say everything (sglang/srt/weight_sync/tensor_bucket.py, read in 0.5.17).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor as servers know it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that travel together. starts: byte at which each begins. nbytes: of all."""

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    nbytes: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """The pieces within a buffer [at least nbytes] uint8, as tensors that share its memory."""
        return [
            flat[start : start + piece.nbytes].view(piece.dtype).view(piece.shape)
            for start, piece in zip(self.starts, self.pieces, strict=True)
        ]


def plan_buckets(pieces: Iterable[Piece], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes; a tensor that is larger has one of its own. Empty tensors are left out.

    Tensors of larger elements come first, so that each lies at a multiple of its element's size; otherwise the order
    stays. Every tensor is in exactly one bucket. Raises ValueError when the limit is not positive.
    """
    if limit <= 0:
        raise ValueError(f"a bucket needs room: {limit} bytes")
    buckets: list[Bucket] = []
    members: list[Piece] = []
    size = 0
    for piece in sorted((p for p in pieces if p.nbytes), key=lambda p: -p.dtype.itemsize):
        if members and size + piece.nbytes > limit:
            buckets.append(_bucket(members))
            members, size = [], 0
        members.append(piece)
        size += piece.nbytes
    if members:
        buckets.append(_bucket(members))
    return buckets


def _bucket(pieces: list[Piece]) -> Bucket:
    *starts, end = accumulate((piece.nbytes for piece in pieces), initial=0)
    return Bucket(tuple(pieces), tuple(starts), end)
