"""Packing: every row exactly once, under the budget, the same number of micro-batches on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.train.layout import PackedLayout
from trainer.train.microbatches import (
    PrefixGroup,
    beyond_budget,
    distinct_tokens,
    first_fit_decreasing,
    room_for,
    share_out,
)
from trainer.train.packing import pack
from trainer.types import Row

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
BUDGETS = st.integers(50, 200)
CPU = torch.device("cpu")


@given(LENGTHS, st.integers(20, 200))
def test_bins_hold_every_row_once_and_respect_the_budget(lengths: list[int], budget: int) -> None:
    bins = first_fit_decreasing(lengths, budget)
    sums = [sum(lengths[i] for i in b) for b in bins]

    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(total <= budget or len(b) == 1 for b, total in zip(bins, sums, strict=True))  # a longer row is alone
    # A bin is opened only for a row that fits nowhere: no two bins would fit into one.
    assert all(a + b > budget for n, a in enumerate(sums) for b in sums[n + 1 :])
    assert [] not in bins


def test_rows_that_are_longer_than_a_micro_batch_leave_their_group() -> None:
    lengths = [60, 58, 200, 62, 300]
    group = PrefixGroup(50, ((0,), (1,), (2,), (3,), (4,)))

    [one] = share_out([group], lengths, 1, 90)
    first, second = share_out([group], lengths, 2, 90)

    assert sorted(one) == [[0, 1, 3], [2], [4]]  # three rows share a prefix of 50 tokens and take 80
    assert sorted(batch for plan in (first, second) for batch in plan if batch) == sorted(one)
    assert sorted(share_out([PrefixGroup(50, ((0,), (2,)))], lengths, 1, 90)[0]) == [[0], [2]]


@given(LENGTHS, st.integers(1, 5), BUDGETS)
def test_rows_are_shared_out_whole_and_evenly(lengths: list[int], ranks: int, budget: int) -> None:
    groups = [PrefixGroup(0, ((i,),)) for i in range(len(lengths))]
    plans = share_out(groups, lengths, ranks, budget)
    load = [sum(lengths[i] for batch in plan for i in batch) for plan in plans]

    assert len(plans) == ranks
    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(lengths)))
    assert len({len(plan) for plan in plans}) == 1
    assert len(plans[0]) >= 1
    assert all(sum(lengths[i] for i in batch) <= budget for plan in plans for batch in plan)
    assert max(load) - min(load) <= max(lengths, default=0)
    assert plans == share_out(groups, lengths, ranks, budget)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_attention_blocks_cover_every_position_once_and_mix_no_rows(lengths: list[int]) -> None:
    layout = PackedLayout.of(lengths, CPU)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rows = {(s, s + n) for s, n in zip(starts, lengths, strict=True)}

    found = set()
    for block in layout.blocks:
        for index, valid in zip(block.index, block.valid, strict=True):
            places = index[valid].tolist()
            assert places == list(range(places[0], places[-1] + 1))
            assert set(index[~valid].tolist()) <= {places[0]}
            found.add((places[0], places[-1] + 1))
        assert block.valid.double().mean() >= 0.75
    assert found == rows
    assert layout.num_tokens == sum(lengths)


def test_a_packed_row_by_hand() -> None:
    batch = pack(
        [
            Row([11, 12, 13], [14, 15], [-0.1, -0.2], advantage=2.0, weight=0.5, trajectory=7),
            Row(
                [21], [22, 23, 24], [-1.0, -2.0, -3.0], -1.0, 0.25, 9, old_logprobs=[-1.5] * 3, ref_logprobs=[-4.0] * 3
            ),
        ],
        CPU,
    )

    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 23, 24]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert batch.loss_index.tolist() == [2, 3, 5, 6, 7]
    assert batch.targets.tolist() == [14, 15, 22, 23, 24]
    assert batch.behave_logprobs.tolist() == pytest.approx([-0.1, -0.2, -1, -2, -3])
    assert batch.old_logprobs.tolist() == pytest.approx([-0.1, -0.2, -1.5, -1.5, -1.5])
    assert batch.ref_logprobs.tolist() == [0, 0, -4, -4, -4]
    assert batch.advantages.tolist() == [2, 2, -1, -1, -1]
    assert batch.weights.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert batch.sequence.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(("multiple", "tokens"), [(1, 9), (3, 9), (4, 12), (8, 16)])
def test_a_packed_row_is_filled_up_with_tokens_that_train_nothing(multiple: int, tokens: int) -> None:
    rows = [
        Row([11, 12, 13], [14, 15], [-0.1, -0.2], 2.0, 0.5, 7),
        Row([21, 22], [23, 24], [-1.0, -2.0], -1.0, 0.25, 9),
    ]
    plain, filled = pack(rows, CPU), pack(rows, CPU, multiple=multiple)

    assert filled.input_ids.shape == filled.position_ids.shape == (1, tokens)
    assert filled.layout.num_tokens == tokens
    assert filled.input_ids[0, :9].tolist() == plain.input_ids[0].tolist()
    assert filled.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, *range(4, tokens - 5)]
    for name in ("loss_index", "targets", "expand", "weights"):
        assert torch.equal(getattr(filled, name), getattr(plain, name))


def test_no_rows_still_make_a_pass_that_weighs_nothing() -> None:
    batch = pack([], CPU)

    assert batch.input_ids.numel() > 1
    assert len(batch.targets) == 1
    assert batch.weights.tolist() == batch.advantages.tolist() == [0.0]


def test_a_group_is_divided_among_ranks_in_few_parts_rather_than_in_rows_that_share_nothing() -> None:
    """48 groups of 16 rows on 128 ranks: an optimizer step of MemAgent's, its memories a quarter of their limit."""
    prefix, own, ranks = 5250, 512, 128
    rows = [tuple((16 * number + row,) for row in range(16)) for number in range(48)]
    groups, lengths = [PrefixGroup(prefix, of) for of in rows], [prefix + own] * (16 * 48)

    plan = share_out(groups, lengths, ranks, 40960)

    loads = distinct_tokens(plan, groups, lengths)
    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(16 * 48))
    even = 48 * (prefix + 16 * own) / ranks
    assert max(loads) <= 2 * even  # rows alone: 6.8 times
    assert sum(loads) <= 1.5 * 48 * (prefix + 16 * own)


def test_one_large_group_is_divided_among_all_ranks() -> None:
    """A long system prompt binds all rows of a step together."""
    groups, lengths = [PrefixGroup(500, tuple((row,) for row in range(512)))], [1500] * 512

    plan = share_out(groups, lengths, 128, 32768)

    assert distinct_tokens(plan, groups, lengths) == [500 + 4 * 1000] * 128


def test_ranks_are_balanced_by_tokens_where_keys_fill_a_micro_batch() -> None:
    """Two groups of 16 rows with 50 tokens of their own: 8,800 tokens, and keys of 17,100."""
    groups = [PrefixGroup(8000, tuple((16 * number + row,) for row in range(16))) for number in range(2)]
    lengths = [8050] * 32

    plan = share_out(groups, lengths, 3, 32768)

    assert max(distinct_tokens(plan, groups, lengths)) <= 8800
    assert room_for(groups[0], lengths) == (16 * 8050 + 8000) // 8


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.lists(st.integers(1, 300), min_size=1, max_size=20)), max_size=12),
    st.integers(1, 16),
    st.integers(200, 2000),
)
def test_every_row_is_computed_once_within_the_budget_and_ranks_have_as_many_micro_batches(
    drawn: list[tuple[int, list[int]]], ranks: int, budget: int
) -> None:
    groups, lengths = [], []
    for prefix, own in drawn:
        groups.append(PrefixGroup(prefix, tuple((len(lengths) + row,) for row in range(len(own)))))
        lengths += [prefix + length for length in own]

    plan = share_out(groups, lengths, ranks, budget)

    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(len(lengths)))
    assert len({len(batches) for batches in plan}) == 1
    for batch in (batch for rank in plan for batch in rank):
        assert len(batch) < 2 or sum(distinct_tokens([[batch]], groups, lengths)) <= budget


def test_what_a_larger_budget_saves_is_no_more_than_a_rank_computes() -> None:
    """All rows of a step begin alike: no rank ever needs room for all of them."""
    groups, lengths = [PrefixGroup(500, tuple((row,) for row in range(64)))], [1500] * 64
    plan = share_out(groups, lengths, 2, 8500)

    again, room = beyond_budget(plan, groups, lengths, 8500)

    assert again == 8 * 8500 - 2 * 32500
    assert room == 32500
