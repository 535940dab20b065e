"""Rows as flat arrays: what is made of them again is trained on as they were."""

from __future__ import annotations

import dataclasses
import pickle

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.train.packing import pack
from trainer.train.shares import FlatRows
from trainer.types import Row

CPU = torch.device("cpu")
LOGPROB = st.floats(-30, 0)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    ids = st.lists(st.sampled_from([0, 1, 2, 255, 256, 65536, 152063]), min_size=1, max_size=12)
    response = draw(ids)
    logprobs = st.lists(LOGPROB, min_size=len(response), max_size=len(response))
    numbers = st.floats(-2, 2)
    return Row(
        draw(ids), response, draw(logprobs), draw(numbers), draw(numbers), draw(st.integers(-1, 9)),
        draw(st.none() | logprobs), draw(st.none() | logprobs),
    )  # fmt: skip


@given(st.lists(st.lists(rows(), max_size=5), min_size=1, max_size=3))
def test_micro_batches_of_rows_that_were_sent_are_those_of_the_rows(batches: list[list[Row]]) -> None:
    again = pickle.loads(pickle.dumps(FlatRows.of(batches))).rows()

    assert [len(batch) for batch in again] == [len(batch) for batch in batches]
    for found, expected in zip(again, batches, strict=True):
        assert [(list(r.prompt_ids), list(r.response_ids), r.trajectory) for r in found] == [
            (r.prompt_ids, r.response_ids, r.trajectory) for r in expected or []
        ]
        one, other = pack(found, CPU), pack(expected, CPU)
        for field in dataclasses.fields(one):
            mine, its = getattr(one, field.name), getattr(other, field.name)
            if isinstance(its, torch.Tensor):
                assert mine.dtype == its.dtype
                assert torch.equal(mine, its), field.name
        assert one.layout.lengths == other.layout.lengths
        assert one.layout.prefixes == other.layout.prefixes


def test_tokens_take_as_few_bytes_as_the_vocabulary_allows() -> None:
    def flat(token: int) -> FlatRows:
        return FlatRows.of([[Row([token] * 1000, [1], [-0.5], 1.0, 1.0, 0)]])

    assert [flat(token).ids.itemsize for token in (255, 65535, 152063)] == [1, 2, 4]
    assert len(pickle.dumps(flat(65535), pickle.HIGHEST_PROTOCOL)) < 2 * 1001 + 1600
