"""Corrections for an engine that disagrees with the trainer, and the table of algorithms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.algorithms.losses import cispo, gspo, ppo_clip
from trainer.algorithms.mismatch import sequence_keep, tis_weights
from trainer.algorithms.objective import policy_loss
from trainer.algorithms.table import TABLE, Algorithm, overlong_penalty, resolve
from trainer.config import RunConfig
from trainer.config_parts import AlgorithmConfig

SEQUENCE = torch.tensor([0, 0, 1, 1, 2, 3])
RATIOS = torch.tensor([1.0, 5.0, 0.5, 2.0, 0.2, 1.1], dtype=torch.float64)
BEHAVE = torch.full((6,), -2.0, dtype=torch.float64)
OLD = BEHAVE + RATIOS.log()


def test_importance_weights_are_trainer_over_engine_up_to_the_cap() -> None:
    assert tis_weights(OLD, BEHAVE, 2.0).tolist() == pytest.approx([1, 2, 0.5, 2, 0.2, 1.1])
    assert tis_weights(OLD, BEHAVE, 0.0).tolist() == [1.0] * 6


def test_importance_weights_carry_no_gradient() -> None:
    logp = OLD.clone().requires_grad_()

    assert not tis_weights(logp, BEHAVE, 2.0).requires_grad


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("none", [True] * 6),
        # Sequence 0 holds a 5 and sequence 2 a 0.2: outside [0.33, 3].
        ("max", [False, False, True, True, False, True]),
        # Geometric means: sqrt(5) = 2.24, 1, 0.2, 1.1.
        ("geometric", [True, True, True, True, False, True]),
    ],
)
def test_whole_responses_are_left_out(rule: str, kept: list[bool]) -> None:
    assert sequence_keep(OLD, BEHAVE, SEQUENCE, rule, 0.33, 3.0).tolist() == kept


def test_bounds_are_inside() -> None:
    exact = torch.zeros(2, dtype=torch.float64)

    assert sequence_keep(exact, exact, torch.tensor([0, 1]), "max", 1.0, 1.0).tolist() == [True, True]
    assert sequence_keep(exact, exact, torch.tensor([0, 1]), "geometric", 1.0, 1.0).tolist() == [True, True]


@pytest.mark.parametrize("rule", ["max", "geometric"])
@pytest.mark.parametrize("bad", [1e4, -1e4, math.inf, -math.inf, math.nan])
def test_a_ratio_beyond_numbers_is_outside(rule: str, bad: float) -> None:
    behave = torch.tensor([-1.0, -1.0, -1.0])
    trainers = behave + torch.tensor([0.0, bad, 0.0])

    assert sequence_keep(trainers, behave, torch.tensor([0, 0, 1]), rule, 0.33, 3.0).tolist() == [False, False, True]


def test_a_narrow_geometric_mask_sees_a_drift_that_no_token_shows() -> None:
    drift = torch.full((50,), 0.02, dtype=torch.float64)
    noise = torch.tensor([0.02, -0.02] * 25, dtype=torch.float64)
    zeros = torch.zeros(50, dtype=torch.float64)
    one = torch.zeros(50, dtype=torch.long)

    assert not sequence_keep(drift, zeros, one, "geometric", 0.99, 1.01).any()
    assert sequence_keep(noise, zeros, one, "geometric", 0.99, 1.01).all()


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_name_has_a_row() -> None:
    assert set(TABLE) == set(get_args(AlgorithmConfig.model_fields["name"].annotation))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("grpo", Algorithm("ppo", "mean", "token", 0.2, 0.2, 3.0)),
        ("dapo", Algorithm("ppo", "mean_std", "token", 0.2, 0.28, None, True, 4096 / 20480)),
        ("dr_grpo", Algorithm("ppo", "mean", "constant", 0.2, 0.2, None)),
    ],
)
def test_rows_are_as_published(name: str, row: Algorithm) -> None:
    assert resolve(AlgorithmConfig(name=name)) == row


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("advantage", "mean_std"),
        ("loss_norm", "trajectory_mean"),
        ("clip_low", 0.0),
        ("clip_high", 0.5),
        ("dual_clip", 5.0),
    ],
)
def test_a_field_that_is_set_overrides_the_row_and_no_other(field: str, value: object) -> None:
    plain, changed = resolve(AlgorithmConfig()), resolve(AlgorithmConfig.model_validate({field: value}))

    assert getattr(changed, field) == value
    assert {f for f in Algorithm.__slots__ if getattr(plain, f) != getattr(changed, f)} == {field}


def test_dual_clip_can_be_turned_off() -> None:
    assert resolve(AlgorithmConfig(dual_clip=0)) == replace(TABLE["grpo"], dual_clip=None)
    with pytest.raises(ValidationError, match="choose more than 1, 3 for example, or 0, off"):
        AlgorithmConfig(dual_clip=0.5)


# -- DAPO's reward and sampling --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1)]
)
def test_the_soft_overlong_punishment_is_that_of_the_paper(length: int, penalty: float) -> None:
    assert overlong_penalty(length, 20480, RunConfig(algorithm={"name": "dapo"}).overlong_buffer(20480)) == penalty


@pytest.mark.parametrize("name", sorted(TABLE))
def test_only_dapo_punishes_length_and_replaces_groups_unless_asked(name: str) -> None:
    plain = RunConfig(algorithm={"name": name}, agent={"max_chunks": 4})

    assert (plain.overlong_buffer(1000), plain.refills) == ((200, True) if name == "dapo" else (0, False))
    asked = RunConfig(
        algorithm={"name": name, "overlong_tokens": 70}, rollout={"refill": name != "dapo"}, agent={"max_chunks": 4}
    )
    assert (asked.overlong_buffer(1000), asked.refills) == (70, name != "dapo")


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_row_uses_its_own_loss_and_ranges(name: str) -> None:
    torch.manual_seed(0)
    old, advantage = -torch.rand(40, dtype=torch.float64), torch.randn(40, dtype=torch.float64)
    logp, sequence = old + 0.6 * torch.randn(40), torch.arange(40) // 7
    a = resolve(AlgorithmConfig(name=name, clip_low=0.1, clip_high=0.3))

    def expected() -> tuple[Tensor, Tensor]:
        if name == "gspo":
            return gspo(logp, old, advantage, sequence, 0.1, 0.3)
        if name == "cispo":
            return cispo(logp, old, advantage, 0.1, 0.3)
        return ppo_clip(logp, old, advantage, 0.1, 0.3, 3.0 if name == "grpo" else None)

    loss, clipped = policy_loss(a, logp, old, advantage, sequence)

    assert torch.equal(loss, expected()[0])
    assert torch.equal(clipped, expected()[1])
    assert clipped.any()
