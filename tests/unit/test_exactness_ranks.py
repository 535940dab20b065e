"""Two real ranks (gloo, FSDP2) take the same step as one, however unevenly the rows fall."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from forkserver import run_ranks

from trainer.train.distributed import single_world
from trainer.train.microbatches import share_out
from trainer.train.prefixes import prefix_groups


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes reports."""
    return run_ranks(ranks.main, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Any]:
    return ranks.run_all(single_world())


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def start(name: str) -> dict[str, torch.Tensor]:
    lm = ranks.small_parts().lm if ranks.CASES[name][0] == "llama" else ranks.grouped_query_lm()
    return {n: p.detach() for n, p in lm.named_parameters()}


@pytest.mark.parametrize("name", sorted(ranks.CASES))
def test_two_ranks_make_the_step_of_one(name: str, two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    expected = one_rank[name]
    assert far(expected["parameters"], start(name)) > 1e-3  # the steps moved something

    for found in two_ranks:
        assert far(found[name]["parameters"], expected["parameters"]) <= 1e-6
        for mine, its in zip(found[name]["stats"], expected["stats"], strict=True):
            for key in its.keys() - {"micro_batches"}:
                assert mine[key] == pytest.approx(its[key], rel=1e-4, abs=1e-6), key
    first, second = (found[name]["logprobs"] for found in two_ranks)
    assert second == []  # rank 0 has the rows
    for a, b in zip(first, expected["logprobs"], strict=True):
        assert a == pytest.approx(b, abs=3e-5)  # float32 log-probs down to -12


@pytest.mark.parametrize(
    ("shared", "whole"), [("shared", "whole_rows"), *((f"random_{n}", f"random_{n}_whole") for n in ranks.RANDOM)]
)
def test_ranks_that_share_prefixes_make_the_step_of_whole_rows(
    shared: str, whole: str, two_ranks: list[dict[str, Any]]
) -> None:
    for found in two_ranks:
        assert far(found[shared]["parameters"], found[whole]["parameters"]) <= 1e-6


def test_the_cases_are_as_uneven_as_they_say() -> None:
    def plan(name: str) -> list[list[list[int]]]:
        model, count, settings = ranks.CASES[name]
        lm = ranks.small_parts().lm if model == "llama" else ranks.grouped_query_lm()
        rows = ranks.case_rows(lm, count, 0)
        lengths = [row.num_tokens for row in rows]
        budget = int(settings[0].partition("=")[2]) if settings else 1 << 20
        shares = share_out(prefix_groups(rows), lengths, 2, budget)
        tokens = [sum(lengths[i] for b in rank for i in b) for rank in shares]
        assert tokens[0] != tokens[1]
        return shares

    assert plan("idle_rank") == [[[0]], [[]]]
    first, second = plan("empty_micro_batch")
    assert [] in first or [] in second
    assert len(plan("tied")[0]) > 1
    rows = ranks.case_rows(ranks.grouped_query_lm(), ranks.GROUPS, 0)
    lengths = [[sum(rows[i].num_tokens for i in batch) for batch in rank] for rank in plan("long_rows")]
    assert any(length > 50 for rank in lengths for length in rank)  # alone in their micro-batches
    for name in ("shared", *(f"random_{n}" for n in ranks.RANDOM)):
        groups = prefix_groups(ranks.case_rows(ranks.grouped_query_lm(), ranks.CASES[name][1], 0))
        assert any(group.prefix for group in groups), name


def test_a_bad_gradient_on_one_rank_stops_both(two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    for found in (*two_ranks, one_rank):
        assert found["poisoned"] == {"stepped": False, "unchanged": True}


def test_every_rank_samples_from_the_new_weights(two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    assert far(one_rank["published"], start("tied")) > 1e-3
    for found in two_ranks:
        assert far(found["published"], one_rank["published"]) <= 1e-6


def test_ranks_share_an_evaluation_and_agree_on_it(two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    # Two updates and an answer for each of seven tasks; tasks 0, 3 and 6 are right.
    assert one_rank["evaluation"]["asked"] == [21]
    for found in (*two_ranks, one_rank):
        assert found["evaluation"]["num_tasks"] == 7
        assert found["evaluation"]["accuracy"] == found["evaluation"]["em"] == pytest.approx(3 / 7)
    assert two_ranks[0]["evaluation"]["asked"] == two_ranks[1]["evaluation"]["asked"] == [12, 9]


def test_collectives_of_a_world(two_ranks: list[dict[str, Any]], one_rank: dict[str, Any]) -> None:
    assert [found["agreed"] for found in two_ranks] == [[True, False, [0, 1]]] * 2
    assert one_rank["agreed"] == [False, False, [0]]


@pytest.fixture(scope="module")
def sent(
    two_ranks: list[dict[str, Any]], one_rank: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[dict[str, Any]]]:
    """What the ranks of 1, 2 and 4 report of the rows that they were sent."""
    four = run_ranks(ranks.sent, 4, tmp_path_factory.mktemp("four"))
    return {1: [one_rank["sent"]], 2: [found["sent"] for found in two_ranks], 4: four}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_that_come_as_arrays_lead_to_the_same_bits_as_objects(
    size: int, sent: dict[int, list[dict[str, Any]]]
) -> None:
    for found in sent[size]:
        for name, expected in found["objects"].items():
            mine = found["arrays"][name]
            assert all(torch.equal(mine["parameters"][n], its) for n, its in expected["parameters"].items())
            assert mine["stats"] == expected["stats"]
            assert mine["logprobs"] == expected["logprobs"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_is_sent_its_rows_and_not_the_others(size: int, sent: dict[int, list[dict[str, Any]]]) -> None:
    tokens = sent[size][0]["received"]["tokens"]

    # One byte a token of this vocabulary, four a log-prob (three tokens in ten of these are sampled), and the names of
    # twelve arrays. As objects, or sent to all, it would be several times that.
    received = [found["received"] for found in sent[size]]
    for kind in ("step", "logprobs"):
        assert received[0][kind] < 200  # it has them
        for found in received[1:]:
            assert 0.8 * tokens / size < found[kind] < 3 * tokens / size + 1600


def test_each_rank_gets_its_own_and_rank_0_everything(sent: dict[int, list[dict[str, Any]]]) -> None:
    for size, found in sent.items():
        assert [one["scattered"] for one in found] == [f"for {rank}" for rank in range(size)]
        assert [one["collected"] for one in found] == [list(range(size)), *([[]] * (size - 1))]


def test_ranks_agree_on_the_groups_of_a_batch_and_rank_0_has_their_turns(sent: dict[int, list[dict[str, Any]]]) -> None:
    for found in sent.values():
        first, *others = (one["refilled"] for one in found)
        assert len(first["tasks"]) == 4
        assert first["next"] > 4  # some were replaced
        assert first["turns"] == [2] * 8
        for one in others:
            assert one == first | {"turns": [0] * 8}
