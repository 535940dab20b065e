"""Packing: every row exactly once, under the budget, the same number of micro-batches on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.train.layout import PackedLayout
from trainer.train.microbatches import PrefixGroup, first_fit_decreasing, share_out
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

    # Rows of a group, by its number, in a micro-batch: its prefix counts once.
    loads = [sum(prefix * len({row // 16 for row in batch}) + own * len(batch) for batch in rank) for rank in plan]
    assert sorted(row for rank in plan for batch in rank for row in batch) == list(range(16 * 48))
    even = 48 * (prefix + 16 * own) / ranks
    assert max(loads) <= 2 * even  # rows alone: 6.8 times
    assert sum(loads) <= 1.5 * 48 * (prefix + 16 * own)
