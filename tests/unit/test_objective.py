"""What a step minimises: finite gradients for any log-probs, and nothing at all from what is not learned from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import learner, sampled_rows, small_config, small_parts
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms.losses import LOG_RATIO_BOUND, ppo_clip
from trainer.algorithms.mismatch import tis_weights
from trainer.algorithms.objective import objective
from trainer.algorithms.table import TABLE, resolve
from trainer.config_parts import AlgorithmConfig

SEQUENCE = torch.tensor([0, 0, 1, 1, 1, 2])
LOGPROBS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=6, max_size=6)


def made(config: AlgorithmConfig, logp: list[float], old: list[float], behave: list[float], **others: Any) -> Any:
    """The objective of six tokens of three responses, and its gradient with respect to the policy's log-probs."""
    policy = torch.tensor(logp, dtype=torch.float32, requires_grad=True)
    values = {"ref_logp": old, "advantage": [1.0, 1.0, -1.0, -1.0, -1.0, 2.0], "weight": [0.25] * 6} | others
    found = objective(
        resolve(config), config, policy, torch.tensor(old), torch.tensor(behave),
        sequence=SEQUENCE, **{name: torch.tensor(value) for name, value in values.items()},
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(found.loss, policy)
    return found, gradient


@pytest.mark.parametrize("name", sorted(TABLE))
@given(
    logp=LOGPROBS,
    old=LOGPROBS,
    behave=LOGPROBS,
    reference=LOGPROBS,
    advantage=st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6),
    weight=st.lists(st.sampled_from([0.0, 0.25]), min_size=6, max_size=6),
    mask=st.sampled_from(["none", "max", "geometric"]),
    tis_cap=st.sampled_from([0.0, 2.0]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    dual_clip=st.sampled_from([None, 3.0]),
)
def test_loss_and_gradient_are_finite_for_any_logprobs_and_any_mask(
    name: str,
    logp: list[float],
    old: list[float],
    behave: list[float],
    reference: list[float],
    advantage: list[float],
    weight: list[float],
    mask: Any,
    tis_cap: float,
    kl_coef: float,
    dual_clip: float | None,
) -> None:
    config = AlgorithmConfig(name=name, sequence_mask=mask, tis_cap=tis_cap, kl_coef=kl_coef, dual_clip=dual_clip)

    found, gradient = made(config, logp, old, behave, ref_logp=reference, advantage=advantage, weight=weight)

    assert math.isfinite(found.loss.item())
    assert torch.isfinite(gradient).all()
    assert (gradient[~found.kept] == 0).all()


def test_a_huge_ratio_that_the_dual_clip_cuts_off_has_no_gradient_instead_of_nan() -> None:
    logp = torch.tensor([99.0, -1.0], requires_grad=True)
    loss, clipped = ppo_clip(logp, torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0]), 0.2, 0.2, 3.0)
    loss.sum().backward()

    assert loss.tolist() == [3.0, 1.0]
    assert clipped.tolist() == [True, False]
    assert logp.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("inside", [0.0, 1.5, -LOG_RATIO_BOUND, LOG_RATIO_BOUND])
def test_within_the_bound_nothing_is_changed_by_it(inside: float) -> None:
    logp = torch.tensor([inside - 1], dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_clip(logp, torch.tensor([-1.0], dtype=torch.float64), torch.ones(1), 1.0, 1e12, None)
    loss.sum().backward()

    assert float(loss) == -math.exp(inside)
    assert float(logp.grad) == -math.exp(inside)


def test_truncated_importance_weights_are_bounded_also_without_a_small_cap() -> None:
    weights = tis_weights(torch.tensor([1e4, -1e4, 0.0]), torch.zeros(3), cap=1e30)

    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])


REJECTS = {"sequence_mask": "max", "tis_cap": 0.0}
OLD, BEHAVE = [-1.0] * 6, [-1.0, -1.0, -1.0, -60.0, -1.0, -1.0]  # the second response's ratio is exp(59)


def without(sequence: int, values: Tensor) -> list[float]:
    return values[sequence != SEQUENCE].tolist()


@pytest.mark.parametrize("name", sorted(TABLE))
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e4])
def test_what_is_rejected_never_enters_the_graph(name: str, value: float) -> None:
    config = AlgorithmConfig(name=name, kl_coef=0.1, **REJECTS)
    logp = [-1.1, -0.9, -1.0, -1.2, -1.3, -0.8]
    plain, expected = made(config, logp, OLD, BEHAVE)

    logp[3], reference = value, [-1.0, -1.0, -1.0, value, -1.0, -1.0]
    found, gradient = made(config, logp, OLD, BEHAVE, ref_logp=reference)

    assert found.kept.tolist() == [True, True, False, False, False, True]
    assert float(found.loss) == float(plain.loss)
    assert gradient.tolist() == expected.tolist()
    assert gradient[SEQUENCE == 1].tolist() == [0.0] * 3


def test_a_rejected_response_has_no_kl_term() -> None:
    """By hand: with no advantage only the KL is left, of the tokens that are kept."""
    config = AlgorithmConfig(kl_coef=0.5, **REJECTS)
    reference = [-2.0] * 6
    found, gradient = made(config, [-1.0] * 6, OLD, BEHAVE, advantage=[0.0] * 6, ref_logp=reference)

    each = math.exp(-1) - 1 + 1  # k3 of ref - logp = -1
    assert found.kl.tolist() == pytest.approx([each, each, 0, 0, 0, each])
    assert float(found.loss) == pytest.approx(0.25 * 0.5 * 3 * each)
    assert without(1, gradient) == pytest.approx([0.25 * 0.5 * (1 - math.exp(-1))] * 3)
    assert gradient[SEQUENCE == 1].tolist() == [0.0] * 3


def test_a_step_with_a_ratio_beyond_float32_is_learned_from() -> None:
    lm = small_parts().lm
    rows = sampled_rows(lm, 6, lm.config.vocab_size)
    for row in rows:
        row.old_logprobs = list(row.behave_logprobs)
    far = rows[0]
    far.advantage, far.old_logprobs, far.behave_logprobs = (
        -1.0, [p - 100 for p in far.behave_logprobs], [p - 100 for p in far.behave_logprobs],
    )  # fmt: skip
    one = learner(lm, small_config("algorithm.old_logprobs=recompute"))

    stats = one.step(rows)

    assert stats.stepped
    assert all(math.isfinite(value) for value in stats.values.values())


def test_a_rejected_row_does_not_poison_the_step_of_the_others() -> None:
    lm = small_parts().lm
    rows = sampled_rows(lm, 6, lm.config.vocab_size)
    for row in rows:
        row.old_logprobs = list(row.behave_logprobs)
    rows[0].advantage = -1.0
    rows[0].old_logprobs = [p - 100 for p in rows[0].behave_logprobs]
    settings = ("algorithm.old_logprobs=recompute", "algorithm.sequence_mask=max")

    stats = learner(lm, small_config(*settings)).step(rows)

    assert stats.stepped
    assert stats.values["masked_tokens"] == len(rows[0].response_ids)
