"""Buckets hold every tensor once, whole, where it can be viewed; what is laid out comes back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.weights.buckets import Piece, plan_buckets

DTYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
tensors = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=12)


def pieces(found: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Piece]:
    return [Piece(f"layer.{n}", dtype, shape) for n, (dtype, shape) in enumerate(found)]


@given(tensors, st.integers(1, 2000))
def test_every_tensor_is_in_one_bucket_and_none_is_too_full(
    found: list[tuple[torch.dtype, tuple[int, ...]]], limit: int
) -> None:
    asked = pieces(found)
    buckets = plan_buckets(asked, limit)
    names = [piece.name for bucket in buckets for piece in bucket.pieces]
    assert sorted(names) == sorted(piece.name for piece in asked if math.prod(piece.shape))
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.pieces) == 1
        assert bucket.nbytes == sum(piece.nbytes for piece in bucket.pieces)


@given(tensors, st.integers(1, 2000), st.integers(0, 1 << 30))
def test_what_is_laid_out_comes_back_without_gaps(
    found: list[tuple[torch.dtype, tuple[int, ...]]], limit: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for bucket in plan_buckets(pieces(found), limit):
        flat = torch.zeros(bucket.nbytes + 5, dtype=torch.uint8)
        given_in = [torch.randint(0, 2, piece.shape, generator=generator).to(piece.dtype) for piece in bucket.pieces]
        for view, tensor in zip(bucket.views(flat), given_in, strict=True):
            view.copy_(tensor)
        # As SGLang does it: one after the other, by size alone.
        start = 0
        for piece, tensor in zip(bucket.pieces, given_in, strict=True):
            end = start + piece.nbytes
            assert torch.equal(flat[start:end].view(piece.dtype).reshape(piece.shape), tensor)
            start = end
        assert start == bucket.nbytes


def test_order_stays_and_a_limit_must_leave_room() -> None:
    asked = [Piece(name, torch.bfloat16, (10,)) for name in "cab"]
    assert [piece.name for bucket in plan_buckets(asked, 45) for piece in bucket.pieces] == ["c", "a", "b"]
    assert [len(bucket.pieces) for bucket in plan_buckets(asked, 45)] == [2, 1]
    with pytest.raises(ValueError, match="needs room"):
        plan_buckets(asked, 0)
