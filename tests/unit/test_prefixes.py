"""What rows begin with alike is found from their ids, computed once, and changes no gradient."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import families
import pytest
import ranks
import rowattention
import torch
from builders import gradients, group_rows, grouped_query_lm, learner, parameters, relative_difference, small_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterkit.config.resolve import resolve
from trainer.tasks.recall import Recall
from trainer.train import attention, layers, prefixes
from trainer.train.layout import PackedLayout
from trainer.train.microbatches import KEYS_PER_TOKEN, LEAST_SHARED, PrefixGroup, share_out
from trainer.train.packing import pack
from trainer.train.prefixes import prefix_groups, token_array
from trainer.types import Row
from trainer.warmup.tiny import make_lm, make_tokenizer

CPU = torch.device("cpu")
FREE = ("train.grad_clip=1e9", "algorithm.clip_low=0.999", "algorithm.clip_high=1e9")  # gradients as they are

# Ids of a small alphabet, so that rows begin alike in every way: within responses, whole prompts, nothing.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
SHORT = st.lists(st.integers(0, 1), min_size=6, max_size=6)


def rows_of(prompts: Any, most: int) -> Any:
    return st.lists(st.builds(lambda p, r: Row(p, r, [0.0] * len(r), 1.0, 1.0, 0), prompts, TOKENS), max_size=most)


def common(rows: Sequence[Row]) -> int:
    """Tokens that the rows may share: alike, and fewer than any prompt."""
    most = min(len(row.prompt_ids) for row in rows) - 1
    columns = zip(*(row.prompt_ids + row.response_ids for row in rows), strict=False)
    return min(most, len(list(itertools.takewhile(lambda column: len(set(column)) == 1, columns))))


def groups_of(rows: list[Row], least: int) -> list[PrefixGroup]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SHARED", least)
        return prefix_groups(rows)


@settings(deadline=None)
@given(rows_of(TOKENS, 12), st.sampled_from([1, 3]))
def test_every_row_is_in_one_group_and_begins_as_the_group_does(rows: list[Row], least: int) -> None:
    groups = groups_of(rows, least)

    assert sorted(number for group in groups for same in group.rows for number in same) == list(range(len(rows)))
    for group in groups:
        for same in group.rows:
            assert len({(tuple(rows[i].prompt_ids), tuple(rows[i].response_ids)) for i in same}) == 1
        if len(group.rows) > 1:
            assert least <= group.prefix <= common([rows[same[0]] for same in group.rows])
        else:
            assert group.prefix == 0


@settings(deadline=None)
@given(rows_of(SHORT, 12), st.sampled_from([1, 2, 3]))
def test_the_groups_save_what_any_length_of_prefixes_would(rows: list[Row], least: int) -> None:
    distinct = list({row.ids: row for row in rows}.values())
    found = sum((len(group.rows) - 1) * group.prefix for group in groups_of(rows, least))

    for length in range(least, 6):
        alike: dict[tuple[int, ...], list[Row]] = {}
        for row in distinct:
            alike.setdefault(tuple(row.prompt_ids[:length]), []).append(row)
        assert found >= sum((len(part) - 1) * common(part) for part in alike.values())


def test_rows_outside_of_the_closest_groups_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_SHARED", 1)
    close = [Row([1, 1, 1, 1, 1, 1, n, 0], [n], [0.0], 1.0, 1.0, 0) for n in (2, 3)]
    loose = [Row([1, n, 1, 1, 1, 1, 1, 0], [n], [0.0], 1.0, 1.0, 0) for n in (4, 5, 6)]

    groups = prefix_groups([loose[0], *close, *loose[1:]])

    assert [(group.prefix, group.rows) for group in groups] == [(1, ((0,), (3,), (4,))), (6, ((1,), (2,)))]


def test_a_system_prompt_before_long_rows_binds_none_of_them() -> None:
    rows = group_rows(grouped(), [(20, [(400, 3)] * 5)])

    assert [group.prefix for group in prefix_groups(rows)] == [0] * 5
    assert len(share_out(prefix_groups(rows), [row.num_tokens for row in rows], 1, 500)[0]) == 5


def test_whole_rows_are_only_put_together_where_they_are_equal() -> None:
    rows = [Row([1, 2, 3], [4], [0.0], 1.0, 1.0, 0), Row([1, 2], [3, 4], [0.0] * 2, 1.0, 1.0, 1)]

    assert [group.rows for group in prefix_groups([*rows, rows[0]], share=False)] == [((0, 2),), ((1,),)]


GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=16)),
    min_size=1,
    max_size=4,
)
# Long ends beside short prefixes too: a prefix may be worth its while in a step and not in a part of it.
LONG_GROUPS = st.lists(
    st.tuples(
        st.sampled_from([10, 20, 40, 200]),
        st.lists(st.tuples(st.sampled_from([3, 30, 300, 900]), st.integers(1, 40)), min_size=2, max_size=12),
    ),
    min_size=1,
    max_size=3,
)


@functools.cache
def grouped() -> Any:
    return grouped_query_lm()


@settings(deadline=None, max_examples=120)
@given(GROUPS | LONG_GROUPS, st.integers(1, 4), st.integers(0, 200))
def test_micro_batches_hold_every_row_once_and_respect_the_budget(
    groups: list[tuple[int, list[tuple[int, int]]]], ranks: int, more: int
) -> None:
    rows = group_rows(grouped(), groups)
    lengths = [row.num_tokens for row in rows]
    budget = max(lengths) + more

    plans = share_out(prefix_groups(rows), lengths, ranks, budget)

    assert sorted(i for plan in plans for batch in plan for i in batch) == list(range(len(rows)))
    assert len(plans) == ranks
    assert len({len(plan) for plan in plans}) == 1
    for batch in (batch for plan in plans for batch in plan if batch):
        packed = pack([rows[i] for i in batch], CPU)
        assert packed.layout.num_tokens <= budget
        assert packed.layout.keys is not None
        assert len(packed.layout.keys.index) <= KEYS_PER_TOKEN * budget
        # Whatever was laid down, each row's tokens are what its segment sees.
        seen = [packed.input_ids[0, packed.layout.keys.index][slice(*edges)] for edges in _pairs(packed.layout)]
        whole = {tuple(token_array(rows[i]).tolist()) for i in batch}
        assert whole <= {tuple(one.tolist()) for one in seen}
    if ranks == 1 and sum(lengths) <= budget:
        shared = sum(lengths) - pack(rows, CPU).layout.num_tokens
        assert shared >= sum((len(members) - 1) * prefix for prefix, members in groups if prefix >= LEAST_SHARED)


def _pairs(layout: PackedLayout) -> list[tuple[int, int]]:
    assert layout.keys is not None
    return list(itertools.pairwise(layout.keys.ends.tolist()))


def test_one_group_stays_whole_on_one_rank_and_is_shared_out_over_several() -> None:
    rows = group_rows(grouped(), [(50, [(2, 3)] * 8)])
    lengths = [row.num_tokens for row in rows]

    (alone,) = share_out(prefix_groups(rows), lengths, 1, 1000)
    shares = share_out(prefix_groups(rows), lengths, 2, 1000)

    assert len(alone) == 1
    assert [len(batch) for plan in shares for batch in plan] == [4, 4]


def test_a_packed_row_with_a_shared_prefix_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_SHARED", 2)
    rows = [
        Row([1, 2, 3, 4], [5], [-0.1], 1.0, 1.0, 0),
        Row([9, 9], [8], [-0.2], 1.0, 1.0, 1),
        Row([1, 2, 3], [6, 7], [-0.3, -0.4], 1.0, 1.0, 2),
    ]

    batch = pack(rows, CPU)

    # 1 2 are laid down once; the last token of a prompt stays with its response.
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 3, 6, 7, 9, 9, 8]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 0, 1, 2]]
    assert batch.targets.tolist() == [5, 6, 7, 8]
    assert batch.loss_index.tolist() == [3, 5, 6, 9]
    assert batch.behave_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert batch.expand.tolist() == [0, 3, 1, 2]
    assert batch.layout.spans == ((0, 2), (2, 5), (2, 5), (0, 3))
    assert batch.layout.keys is not None
    assert batch.layout.keys.index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10]
    assert batch.layout.keys.ends.tolist() == [0, 2, 7, 12, 15]


def test_what_a_group_that_has_no_room_computes_again_is_told() -> None:
    """Eight rows share 50 tokens and have 5 of their own: 90, of which a micro-batch of 70 holds half."""
    rows = group_rows(grouped(), [(50, [(2, 3)] * 8)])
    roomy, tight = (
        learner(grouped(), small_config(f"train.max_tokens_per_mb={tokens}")).step(rows) for tokens in (90, 70)
    )

    assert roomy.work.numbers(1, None)["train_repeated"] == 0.0
    assert roomy.work.numbers(1, None)["train_group_tokens"] == 90.0
    assert tight.work.tokens == 140
    assert tight.work.numbers(1, None)["train_repeated"] == pytest.approx(50 / 140)
    assert tight.work.numbers(1, None)["train_group_tokens"] == 90.0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(GROUPS, st.integers(0, 100), st.sampled_from(["grpo", "gspo"]))
def test_gradients_are_those_of_whole_rows(
    groups: list[tuple[int, list[tuple[int, int]]]], more: int, algorithm: str
) -> None:
    rows = group_rows(grouped(), groups)
    # Borders of micro-batches fall inside of groups.
    budget = max(16, *(row.num_tokens for row in rows)) + more

    same_step(grouped(), rows, (f"train.max_tokens_per_mb={budget}", f"algorithm.name={algorithm}"))


def same_step(lm: Any, rows: list[Row], config: tuple[str, ...] = (), limit: float = 1e-5) -> float:
    """Take a step on shared prefixes and on whole rows; returns the share of tokens that was not computed."""
    shared, whole = (
        learner(lm, small_config(*FREE, *config, f"train.share_prefixes={on}")) for on in ("true", "false")
    )
    found, stats = gradients(shared, rows)
    expected, other = gradients(whole, rows)
    assert relative_difference(found, expected) <= limit
    for name in other.values.keys() - {"micro_batches"}:
        assert stats.values[name] == pytest.approx(other.values[name], rel=1e-4, abs=1e-6), name
    for one, two in zip(shared.logprobs(rows), whole.logprobs(rows), strict=True):
        assert one == pytest.approx(two, abs=2e-4)
    assert stats.work.row_tokens == other.work.row_tokens == sum(row.num_tokens for row in rows)
    return 1 - stats.work.tokens / stats.work.row_tokens


GROUP_OF_EIGHT = [(60, [(5, 4), (9, 2), (1, 8), (3, 3), (7, 5), (2, 2), (11, 1), (4, 6)]), (20, [(2, 2), (3, 5)])]
DOUBLE = pytest.mark.parametrize("way", ["blocks", "kernel", "compiled"])


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Attend by padded blocks, through a flash kernel's stand-in, or through that in compiled layers."""
    if way == "blocks":
        return ()
    rowattention.use(monkeypatch)
    monkeypatch.setattr(PackedLayout, "blocks", property(lambda _: pytest.fail("blocks were made")))
    monkeypatch.setattr(layers, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    return ("train.compile=true",) if way == "compiled" else ()


@DOUBLE
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_every_way_to_compute_layers_shares_prefixes(
    way: str, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = (*use(way, monkeypatch), f"model.gradient_checkpointing={checkpointing}")

    assert same_step(grouped(), group_rows(grouped(), GROUP_OF_EIGHT), settings) > 0.6


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("way", ["kernel", "compiled"])
def test_random_groups_share_prefixes_through_a_kernel(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = group_rows(grouped(), ranks.random_groups(seed))
    budget = max(row.num_tokens for row in rows) + 20

    assert sum(row.num_tokens for row in rows) > 2 * budget
    assert same_step(grouped(), rows, (*use(way, monkeypatch), f"train.max_tokens_per_mb={budget}")) > 0.1


@pytest.mark.parametrize("way", ["blocks", "kernel"])
@pytest.mark.parametrize("kind", ["mistral_window", "qwen3_window", "gemma3", "smollm3", "llama_yarn", "gemma2"])
def test_every_class_of_models_shares_prefixes(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "gemma2" and way == "kernel":
        way = "blocks"  # no flash kernel caps scores
    lm = families.make(*families.KINDS[kind])
    lm.config._attn_implementation = attention.IMPLEMENTATION

    assert same_step(lm, group_rows(lm, GROUP_OF_EIGHT), use(way, monkeypatch)) > 0.6


def test_compiled_layers_are_compiled_once_for_whole_and_shared_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = use("compiled", monkeypatch)
    one = learner(grouped(), small_config(*FREE, *settings))
    torch._dynamo.utils.counters.clear()

    one.step(group_rows(grouped(), GROUP_OF_EIGHT))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    one.step(group_rows(grouped(), [(8, [(3, 5)] * 3), (50, [(1, 1)])]))  # nothing to share
    one.step(group_rows(grouped(), [(33, [(3, 5)] * 16)]))

    assert 2 <= graphs <= 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_same_step_twice_is_the_same_to_the_bit() -> None:
    rows = group_rows(grouped(), GROUP_OF_EIGHT)
    make: Callable[[], Any] = lambda: gradients(learner(grouped(), small_config(*FREE)), rows)[0]  # noqa: E731
    first, second = make(), make()

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_ten_steps_of_tiny_end_at_the_parameters_of_whole_rows() -> None:
    """With the preset's own model and optimizer, on the same rows."""
    config = resolve("tiny", None, ()).config
    vocabulary = Recall(config.task, config.seed).vocabulary()
    lm = make_lm(config.model, make_tokenizer(vocabulary), config.seed).eval()
    ends = {}
    for share in (True, False):
        train = config.train.model_copy(update={"share_prefixes": share})
        one = learner(lm, config.model_copy(update={"train": train}))
        for seed in range(10):
            assert one.step(group_rows(lm, GROUP_OF_EIGHT, seed)).stepped
        ends[share] = parameters(one)
    start = parameters(learner(lm, config))

    apart = {name: float((end - ends[False][name]).abs().max()) for name, end in ends[True].items()}
    moved = max(float((end - start[name]).abs().max()) for name, end in ends[False].items())
    assert max(apart.values()) <= 1e-5
    assert moved > 1e-4
