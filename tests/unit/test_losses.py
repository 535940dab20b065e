"""Policy losses: values by hand, and gradients that are cut off where they should be and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms.losses import cispo, gspo, k3_kl, ppo_clip, sequence_mean


def log(ratios: list[float]) -> Tensor:
    """Log-probs that have these ratios to old log-probs of -1."""
    return (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()


def old(count: int) -> Tensor:
    return torch.full((count,), -1.0, dtype=torch.float64)


def ppo(
    ratios: list[float], advantage: float, low: float = 0.2, high: float = 0.2, dual: float | None = None
) -> tuple[list[float], list[float], list[bool]]:
    """Loss, gradient with respect to the log-prob, and clip indicator at every ratio."""
    logp = log(ratios)
    loss, clipped = ppo_clip(logp, old(len(ratios)), torch.full_like(old(len(ratios)), advantage), low, high, dual)
    loss.sum().backward()
    return loss.tolist(), logp.grad.tolist(), clipped.tolist()


RATIOS = [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 4.0]


def test_ppo_cuts_only_what_would_go_further_up() -> None:
    loss, gradient, clipped = ppo(RATIOS, advantage=2.0)

    assert loss == pytest.approx([-1.0, -1.58, -1.62, -2.0, -2.38, -2.4, -2.4, -2.4])
    assert gradient == pytest.approx([-1.0, -1.58, -1.62, -2.0, -2.38, 0, 0, 0])
    assert clipped == [False] * 5 + [True] * 3


def test_ppo_cuts_only_what_would_go_further_down() -> None:
    loss, gradient, clipped = ppo(RATIOS, advantage=-2.0)

    assert loss == pytest.approx([1.6, 1.6, 1.62, 2.0, 2.38, 2.42, 4.0, 8.0])
    assert gradient == pytest.approx([0, 0, 1.62, 2.0, 2.38, 2.42, 4.0, 8.0])
    assert clipped == [True] * 2 + [False] * 6


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    loss, gradient, clipped = ppo([*RATIOS, 2.9, 3.1], advantage=-2.0, dual=3.0)

    assert loss == pytest.approx([1.6, 1.6, 1.62, 2.0, 2.38, 2.42, 4.0, 6.0, 5.8, 6.0])
    assert gradient == pytest.approx([0, 0, 1.62, 2.0, 2.38, 2.42, 4.0, 0, 5.8, 0])
    assert clipped == [True] * 2 + [False] * 5 + [True, False, True]


def test_dual_clip_leaves_good_tokens_alone() -> None:
    assert ppo(RATIOS, 2.0, dual=3.0) == ppo(RATIOS, 2.0)


def test_clip_higher_moves_the_upper_range_only() -> None:
    _, gradient, clipped = ppo([0.79, 0.81, 1.21, 1.27, 1.29], advantage=1.0, high=0.28)
    assert gradient == pytest.approx([-0.79, -0.81, -1.21, -1.27, 0])
    assert clipped == [False] * 4 + [True]

    _, gradient, clipped = ppo([0.79, 0.81, 1.21, 1.29], advantage=-1.0, high=0.28)
    assert gradient == pytest.approx([0, 0.81, 1.21, 1.29])
    assert clipped == [True, False, False, False]


@given(st.floats(-3, 3), st.floats(0.05, 8), st.floats(0, 0.9), st.floats(0, 3))
def test_ppo_never_rewards_more_than_the_plain_surrogate(
    advantage: float, ratio: float, low: float, high: float
) -> None:
    (loss,), _, _ = ppo([ratio], advantage, low, high)

    assert loss >= -advantage * ratio - 1e-9
    assert loss == pytest.approx(max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)))


SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2])


def test_sequence_means_are_spread_over_their_tokens() -> None:
    values = torch.tensor([1.0, 2.0, 6.0, 4.0, 0.0, -1.0])

    assert sequence_mean(values, SEQUENCE).tolist() == [3, 3, 3, 2, 2, -1]


def test_gspo_has_one_ratio_for_a_response_and_its_gradient() -> None:
    """By hand: L = Σ_i w_i |o_i| · min-surrogate of s_i = exp(mean_t log ratio), so dL/dlogp_t = -A s_i where not
    clipped; with weight 1 / |o_i| that is the paper's -A s_i / |o_i|.
    """
    ratios = [1.1, 0.9, 1.05, 1.4, 1.3, 0.6]
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    logp = log(ratios)

    loss, clipped = gspo(logp, old(6), advantage, SEQUENCE, 0.2, 0.2)
    loss.sum().backward()

    s0, s1 = (1.1 * 0.9 * 1.05) ** (1 / 3), (1.4 * 1.3) ** 0.5
    assert loss.tolist() == pytest.approx([-s0] * 3 + [-1.2] * 2 + [0.8])
    assert clipped.tolist() == [False] * 3 + [True] * 3
    assert s1 > 1.2
    assert logp.grad.tolist() == pytest.approx([-s0] * 3 + [0, 0, 0])


def test_gspos_gradient_is_that_of_the_sequence_objective() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    taken = torch.tensor([0, 3, 2, 4, 1, 1])
    before = torch.log_softmax(logits.detach() + 0.05 * torch.randn(6, 5), -1)[range(6), taken]
    advantage = torch.tensor([1.5, 1.5, 1.5, -0.5, -0.5, 1.0], dtype=torch.float64)
    sizes = torch.tensor([3.0, 3, 3, 2, 2, 1], dtype=torch.float64)

    def grad(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, logits)[0]

    logp = torch.log_softmax(logits, -1)[range(6), taken]
    token_form, _ = gspo(logp, before, advantage, SEQUENCE, 0.5, 0.5)
    found = grad((token_form / sizes).sum())

    logp = torch.log_softmax(logits, -1)[range(6), taken]
    delta = logp - before
    s = torch.stack([delta[:3].mean(), delta[3:5].mean(), delta[5]]).exp()
    expected = grad(-(torch.tensor([1.5, -0.5, 1.0]) * s).sum())
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_clips_the_weight_and_never_the_gradient(advantage: float) -> None:
    logp = log(RATIOS)
    loss, clipped = cispo(logp, old(8), torch.full((8,), advantage, dtype=torch.float64), 0.4, 1.0)
    loss.sum().backward()

    weights = [0.6, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 2.0]
    assert logp.grad.tolist() == pytest.approx([-advantage * w for w in weights])
    assert (logp.grad != 0).all()
    assert clipped.tolist() == [True, *[False] * 6, True]


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1, max_size=20))
def test_k3_is_never_negative_and_zero_at_equality(pairs: list[tuple[float, float]]) -> None:
    logp = torch.tensor([a for a, _ in pairs], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([b for _, b in pairs], dtype=torch.float64)

    assert (k3_kl(logp, reference) >= 0).all()
    at_equality = k3_kl(logp, logp.detach())
    at_equality.sum().backward()
    assert at_equality.tolist() == [0.0] * len(pairs)
    assert logp.grad.tolist() == [0.0] * len(pairs)


def test_k3_pulls_towards_the_reference() -> None:
    logp = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    k3_kl(logp, torch.tensor([-2.0, -2.0], dtype=torch.float64)).sum().backward()

    # d/dlogp (e^d - d - 1) = 1 - e^d with d = ref - logp.
    assert logp.grad.tolist() == pytest.approx([1 - math.exp(-1), 1 - math.exp(1)])


def test_k3_is_unbiased() -> None:
    """Its mean under the policy is exactly the KL, over every outcome of two small categoricals."""
    torch.manual_seed(1)
    policy, reference = (torch.log_softmax(torch.randn(7, dtype=torch.float64), -1) for _ in range(2))

    expected = (policy.exp() * (policy - reference)).sum()

    assert float((policy.exp() * k3_kl(policy, reference)).sum()) == pytest.approx(float(expected), rel=1e-12)
    assert float(expected) > 0.1


def test_k3_is_bounded() -> None:
    far = k3_kl(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]))

    assert far.tolist() == pytest.approx([math.exp(10) - 11, math.exp(-10) + 9])
