"""From real rollouts to the step: the policy that is trained is the policy that sampled, and steps that must not move
anything do not.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from builders import learner, parameters, sampled_rows, small_config, small_parts

from trainer.rollout.batch import make_batch
from trainer.train.learner import Learner, StepAbandonedError
from trainer.types import Row


def state(one: Learner) -> dict[str, torch.Tensor]:
    """Every tensor of the weights and of the optimizer's state, copied."""
    found = dict(parameters(one))
    for number, entry in one.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": value.clone() for name, value in entry.items()}
    return found


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("temperature", ["1.0", "0.8"])
@pytest.mark.parametrize(("order", "repeat"), [("paper", "false"), ("section_first", "false"), ("paper", "true")])
def test_on_policy_every_ratio_is_one(temperature: str, order: str, repeat: str) -> None:
    prompt = (f"agent.prompt_order={order}", f"agent.repeat_problem={repeat}")
    parts = small_parts(f"rollout.temperature={temperature}", *prompt)
    batch = make_batch(parts.rollouts(), parts.config, step=1)
    rows = batch.minibatches[0]

    values = learner(parts.lm, parts.config).step(rows).values

    assert values["trained_tokens"] > 100
    assert values["behave_ratio_max_dev"] <= 1e-5
    assert values["mismatch_kl"] <= 1e-6
    assert abs(values["ppo_approx_kl"]) <= 1e-6
    assert values["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert values["actor_clip_ratio"] == 0


def test_recomputed_logprobs_are_the_engines() -> None:
    parts = small_parts("train.max_tokens_per_mb=200")
    rows = make_batch(parts.rollouts(), parts.config, step=1).minibatches[0]

    found = learner(parts.lm, parts.config).logprobs(rows)

    assert [len(values) for values in found] == [len(row.response_ids) for row in rows]
    sampled = [p for row in rows for p in row.behave_logprobs]
    assert [p for values in found for p in values] == pytest.approx(sampled, abs=1e-5)


def test_the_second_minibatch_sees_moved_weights() -> None:
    parts = small_parts("train.minibatches=2", "train.learning_rate=0.01")
    batch = make_batch(parts.rollouts(), parts.config, step=1)
    one = learner(parts.lm, parts.config)

    first, second = (one.step(rows).values["behave_ratio_max_dev"] for rows in batch.minibatches)

    assert first <= 1e-5
    assert second > 1e-3
    assert one.optimizer_steps == 2


def trained(lm: Any, *overrides: str) -> tuple[Learner, list[Row]]:
    """A learner that has made one step, so that its optimizer has a state, and rows for the next."""
    config = small_config("train.learning_rate=0.01", "train.weight_decay=0.1", *overrides)
    rows = sampled_rows(lm, 6, lm.config.vocab_size)
    for row in rows:
        row.ref_logprobs = list(row.behave_logprobs)
    one = learner(lm, config)
    assert one.step(rows).stepped
    return one, rows


def test_zero_advantages_change_not_one_bit() -> None:
    one, rows = trained(small_parts().lm)
    before = state(one)
    for row in rows:
        row.advantage = 0.0

    result = one.step(rows)

    assert not result.stepped
    assert result.values["trained_tokens"] == 0
    assert identical(state(one), before)
    assert one.optimizer_steps == 1
    assert not one.step([]).stepped
    assert identical(state(one), before)


def test_the_control_of_zero_advantages_reaches_the_rows() -> None:
    parts = small_parts("control.zero_advantages=true", "train.learning_rate=0.01")
    batch = make_batch(parts.rollouts(), parts.config, step=1)
    one = learner(parts.lm, parts.config)
    before = state(one)

    assert batch.minibatches[0]
    assert set(batch.advantages) == {0.0}
    assert not one.step(batch.minibatches[0]).stepped
    assert identical(state(one), before)


def test_with_a_kl_zero_advantages_pull_back_to_the_reference() -> None:
    one, rows = trained(small_parts().lm, "algorithm.kl_coef=1.0")
    for row in rows:
        row.advantage = 0.0
        row.old_logprobs = None
    before = state(one)

    kls = [-one.step(rows).values["kl_reward"] for _ in range(4)]

    assert not identical(state(one), before)
    assert kls[0] > 1e-4  # the first step went away from the reference
    assert kls[-1] < kls[0] / 2


def test_the_kl_gradient_is_weighted_by_its_coefficient() -> None:
    """loss = policy loss + coefficient · k3, both with the rows' token weights."""
    lm = small_parts().lm
    rows = sampled_rows(lm, 6, lm.config.vocab_size)
    for row in rows:
        row.ref_logprobs = [p - 0.5 for p in row.behave_logprobs]

    values = learner(lm, small_config("algorithm.kl_coef=0.5")).step(rows).values

    k3 = math.exp(-0.5) + 0.5 - 1
    total = sum(len(row.response_ids) for row in rows)
    policy = -sum(row.advantage * len(row.response_ids) for row in rows) / total
    assert values["kl_reward"] == pytest.approx(-k3, rel=1e-4)
    assert values["actor_loss"] == pytest.approx(policy + 0.5 * k3, rel=1e-4)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float) -> None:
    one, rows = trained(small_parts().lm)
    before = state(one)
    bad = copy.deepcopy(rows)
    bad[2].advantage = poison

    result = one.step(bad)

    assert not result.stepped
    assert result.values["trained_tokens"] > 0  # what tells a skipped step from one with nothing to learn
    assert identical(state(one), before)
    assert one.optimizer_steps == 1
    assert one.step(rows).stepped  # and nothing of it is left in the gradients
    assert all(torch.isfinite(value).all() for value in parameters(one).values())


def test_an_abandoned_step_leaves_no_trace() -> None:
    lm = small_parts().lm
    one, rows = trained(lm, "train.max_tokens_per_mb=60")
    other, _ = trained(lm, "train.max_tokens_per_mb=60")
    before = state(one)
    asked: list[None] = []

    def after_the_first() -> bool:
        asked.append(None)
        return len(asked) > 1

    with pytest.raises(StepAbandonedError):
        one.step(rows, after_the_first)

    assert len(asked) == 2
    assert identical(state(one), before)
    one.step(rows)
    other.step(rows)
    assert identical(state(one), state(other))


def test_truncated_importance_sampling_scales_the_loss() -> None:
    lm = small_parts().lm
    rows = sampled_rows(lm, 6, lm.config.vocab_size)
    for row in rows:
        row.old_logprobs = list(row.behave_logprobs)
        row.behave_logprobs = [p - math.log(5) for p in row.behave_logprobs]  # trainer : engine is 5
        row.advantage = 1.0

    def loss(cap: float) -> float:
        config = small_config("algorithm.old_logprobs=recompute", f"algorithm.tis_cap={cap}")
        return learner(lm, config).step(rows).values["actor_loss"]

    assert loss(0) == pytest.approx(-1, rel=1e-4)
    assert loss(2) == pytest.approx(-2, rel=1e-4)
    assert loss(7) == pytest.approx(-5, rel=1e-4)


def test_learning_raises_the_probability_of_what_was_rewarded() -> None:
    lm = small_parts().lm
    rows = sampled_rows(lm, 12, lm.config.vocab_size)
    one = learner(lm, small_config("train.learning_rate=0.003"))
    before = [sum(values) for values in one.logprobs(rows)]

    for _ in range(3):
        one.step(rows)

    moved = [sum(values) - b for values, b in zip(one.logprobs(rows), before, strict=True)]
    good = [m for m, row in zip(moved, rows, strict=True) if row.advantage == 1.0]
    bad = [m for m, row in zip(moved, rows, strict=True) if row.advantage == -1.0]
    assert min(good) > 0 > max(bad)
