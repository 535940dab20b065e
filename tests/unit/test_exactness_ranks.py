"""Two real ranks (gloo, FSDP2) take the same step as one, however unevenly the rows fall."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any

import pytest
import ranks
import torch

from trainer.train.distributed import single_world
from trainer.train.packing import share_out
from trainer.train.prefixes import prefix_groups


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes reports."""
    folder = tmp_path_factory.mktemp("ranks")
    context = get_context("spawn")
    processes = [context.Process(target=ranks.main, args=(rank, 2, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


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
        for a, b in zip(found[name]["logprobs"], expected["logprobs"], strict=True):
            assert a == pytest.approx(b, abs=3e-5)  # float32 log-probs down to -12
        for mine, its in zip(found[name]["stats"], expected["stats"], strict=True):
            for key in its.keys() - {"micro_batches"}:
                assert mine[key] == pytest.approx(its[key], rel=1e-4, abs=1e-6), key


def test_ranks_that_share_prefixes_make_the_step_of_whole_rows(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert far(found["shared"]["parameters"], found["whole_rows"]["parameters"]) <= 1e-6


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
