"""Group advantages, credit of turns, and the weights that turn token losses into one number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms.advantages import group_advantages, turn_advantages, zero_variance_groups
from trainer.algorithms.losses import token_weights

REWARDS = st.floats(-100, 100, allow_nan=False, width=32)
BATCHES = st.lists(st.tuples(REWARDS, st.integers(0, 4)), min_size=1, max_size=30)


def advantages(rewards: list[float], groups: list[int] | None = None, norm: str = "mean") -> list[float]:
    numbers = torch.tensor(groups if groups is not None else [0] * len(rewards))
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), numbers, norm).tolist()


def test_one_right_of_four() -> None:
    assert advantages([1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


def test_groups_are_apart_and_in_any_order() -> None:
    assert advantages([1, 5, 0, 7], [9, -3, 9, -3]) == [0.5, -1, -0.5, 1]


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-8, 123456.7, 0.0, -0.3])
@pytest.mark.parametrize("norm", ["mean", "mean_std"])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(reward: float, norm: str, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        found = group_advantages(torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.long), norm)
        assert found.tolist() == [0.0] * size


def test_the_deviation_is_unbiased() -> None:
    # Deviations .75, -.25 (x3): squares sum to .75, over 3 (not 4) is .25, so the deviation is .5.
    found = advantages([1, 0, 0, 0], norm="mean_std")

    assert found == pytest.approx([0.75 / (0.5 + 1e-6), *[-0.25 / (0.5 + 1e-6)] * 3], rel=1e-12)


def test_a_group_of_one_has_no_advantage() -> None:
    assert advantages([1.0, 0.0], [0, 1], "mean_std") == [0.0, 0.0]


@given(BATCHES, st.sampled_from(["mean", "mean_std"]))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(batch: list[tuple[float, int]], norm: str) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    found = advantages(rewards, groups, norm)

    for number in set(groups):
        members = [i for i, g in enumerate(groups) if g == number]
        assert sum(found[i] for i in members) == pytest.approx(0, abs=1e-6)
        best = max(members, key=lambda i: rewards[i])
        assert found[best] == max(found[i] for i in members)


@given(BATCHES, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_rows(batch: list[tuple[float, int]], rng: object) -> None:
    order = list(range(len(batch)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    straight = advantages([r for r, _ in batch], [g for _, g in batch])
    mixed = advantages([batch[i][0] for i in order], [batch[i][1] for i in order])

    assert mixed == pytest.approx([straight[i] for i in order], abs=1e-6)


TURNS = torch.tensor([0] * 2 + [1] * 7 + [2] * 1 + [3] * 3)


def test_every_turn_gets_its_trajectorys_advantage_unchanged() -> None:
    per_trajectory = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64)

    assert turn_advantages(per_trajectory, TURNS, "share").tolist() == [0.75] * 2 + [-0.25] * 11


def test_split_credit_is_shared_among_the_turns() -> None:
    per_trajectory = torch.tensor([0.75, -0.7, 0.5, -0.3], dtype=torch.float64)

    found = turn_advantages(per_trajectory, TURNS, "split")

    assert found.tolist() == pytest.approx([0.375] * 2 + [-0.1] * 7 + [0.5] + [-0.1] * 3, rel=1e-12)


def test_turns_may_come_in_any_order() -> None:
    per_trajectory = torch.tensor([1.0, -4.0])

    assert turn_advantages(per_trajectory, torch.tensor([1, 0, 1]), "share").tolist() == [-4, 1, -4]
    assert turn_advantages(per_trajectory, torch.tensor([1, 0, 1]), "split").tolist() == [-2, 1, -2]


def test_groups_without_a_signal_are_counted() -> None:
    values = torch.tensor([0.5, -0.5, 0, 0, 0, 1e-9], dtype=torch.float64)

    assert zero_variance_groups(values, torch.tensor([0, 0, 1, 1, 7, 8])) == 2


# -- weights ---------------------------------------------------------------------------------------------------------

TOKENS = torch.tensor([3, 1, 4, 2])
TRAJECTORY = torch.tensor([0, 0, 1, 2])


def weigh(norm: str, limit: int = 0, tokens: Tensor = TOKENS, trajectory: Tensor = TRAJECTORY) -> list[float]:
    return token_weights(tokens, trajectory, norm, 3, limit).tolist()


def test_token_weights_by_hand() -> None:
    assert weigh("token") == [0.1] * 4
    assert weigh("trajectory_mean") == pytest.approx([1 / 12, 1 / 12, 1 / 12, 1 / 6], rel=1e-12)
    assert weigh("constant", limit=20) == [1 / 60] * 4


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), min_size=1, max_size=20))
def test_token_weights_make_means(turns: list[tuple[int, int]]) -> None:
    """The mean over all tokens, or over trajectories of their means, is reproduced: weights of all tokens sum to 1."""
    numbers = {t: i for i, t in enumerate(sorted({t for _, t in turns}))}
    tokens, trajectory = torch.tensor([n for n, _ in turns]), torch.tensor([numbers[t] for _, t in turns])

    assert sum(w * n for w, (n, _) in zip(weigh("token", 0, tokens, trajectory), turns, strict=True)) == pytest.approx(
        1
    )
    per_trajectory: dict[int, float] = {}
    for weight, (n, t) in zip(weigh("trajectory_mean", 0, tokens, trajectory), turns, strict=True):
        per_trajectory[t] = per_trajectory.get(t, 0.0) + weight * n
    assert list(per_trajectory.values()) == pytest.approx([1 / len(numbers)] * len(numbers))


def test_a_constant_weight_depends_on_no_response() -> None:
    short = weigh("constant", 20, torch.tensor([1, 1, 1, 1]))

    assert short == weigh("constant", 20)
    with pytest.raises(ValueError, match="needs trajectories and response_limit"):
        weigh("constant", 0)
