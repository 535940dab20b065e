"""The optimizer step computes the gradient it claims to, in whatever pieces it is computed (float32, tiny models)."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from builders import (
    full_logprobs,
    gradients,
    grouped_query_lm,
    learner,
    parameters,
    plain_copy,
    relative_difference,
    sampled_rows,
    small_config,
    small_parts,
)
from torch import Tensor

from trainer.config import RunConfig
from trainer.train import chunks
from trainer.types import Row

FREE = ("train.grad_clip=1e9",)  # gradients as they are


@pytest.fixture(scope="module", params=["llama", "qwen2_grouped"])
def lm(request: pytest.FixtureRequest) -> Any:
    return small_parts().lm if request.param == "llama" else grouped_query_lm()


def off_policy(rows: list[Row], seed: int = 1) -> list[Row]:
    """The same rows as if an older policy had sampled them: ratios far enough from 1 that some are clipped."""
    rng = random.Random(seed)
    moved = copy.deepcopy(rows)
    for row in moved:
        row.behave_logprobs = [p + rng.uniform(-0.5, 0.5) for p in row.behave_logprobs]
    return moved


def reference_gradients(lm: Any, rows: list[Row], config: RunConfig) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients and ratios by the book: float64, one row at a time, nothing packed, all logits, PPO written out."""
    plain = plain_copy(lm)
    plain.zero_grad()
    ratios = []
    for row in rows:
        logp = full_logprobs(plain, row.prompt_ids, row.response_ids, config.rollout.temperature)
        ratio = (logp - torch.tensor(row.behave_logprobs, dtype=torch.float64)).exp()
        bounded = ratio.clamp(0.8, 1.2)
        surrogate = torch.minimum(row.advantage * ratio, row.advantage * bounded)
        (-row.weight * surrogate).sum().backward()
        ratios.append(ratio.detach())
    return {n: p.grad for n, p in plain.named_parameters()}, torch.cat(ratios)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_gradients_are_those_of_single_rows(lm: Any, temperature: float) -> None:
    config = small_config(*FREE, f"rollout.temperature={temperature}", "algorithm.name=dr_grpo")
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size, temperature=temperature))

    found, stats = gradients(learner(lm, config), rows)

    expected, ratios = reference_gradients(lm, rows, config)
    assert relative_difference(found, expected) <= 1e-5
    advantages = torch.cat([torch.full((len(r.response_ids),), r.advantage) for r in rows])
    clipped = ((advantages > 0) & (ratios > 1.2)) | ((advantages < 0) & (ratios < 0.8))
    assert 0 < clipped.sum() < len(clipped)
    assert stats.values["actor_clip_ratio"] == pytest.approx(float(clipped.double().mean()))
    assert stats.values["importance_weight"] == pytest.approx(float(ratios.mean()), rel=1e-5)
    assert stats.values["behave_ratio_max_dev"] == pytest.approx(float((ratios - 1).abs().max()), rel=1e-4)
    assert stats.values["trained_tokens"] == len(ratios)


def same_gradients(lm: Any, rows: list[Row], one: tuple[str, ...], other: tuple[str, ...], limit: float = 1e-5) -> None:
    a, first = gradients(learner(lm, small_config(*FREE, *one)), rows)
    b, second = gradients(learner(lm, small_config(*FREE, *other)), rows)
    assert relative_difference(a, b) <= limit
    assert max(float(g.abs().max()) for g in b.values()) > 1e-4
    different = {"micro_batches"}
    for name in first.values.keys() - different:
        assert first.values[name] == pytest.approx(second.values[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_one_micro_batch_is_many(lm: Any, algorithm: str) -> None:
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    longest = max(row.num_tokens for row in rows)
    name = (f"algorithm.name={algorithm}", "algorithm.clip_low=0.1", "algorithm.clip_high=0.1")
    few, many = learner(lm, small_config()), learner(lm, small_config(f"train.max_tokens_per_mb={longest}"))
    assert few.step(rows).values["micro_batches"] == 1
    assert many.step(rows).values["micro_batches"] >= 3

    same_gradients(lm, rows, name, (*name, f"train.max_tokens_per_mb={longest}"))


def test_masks_see_the_same_responses_in_any_micro_batch(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    exact = learner(lm, small_config()).logprobs(rows)
    for row, values in zip(rows, exact, strict=True):
        row.old_logprobs = values
    longest = max(row.num_tokens for row in rows)
    masks = ("algorithm.old_logprobs=recompute", "algorithm.sequence_mask=max", "algorithm.mask_low=0.7")

    same_gradients(lm, rows, masks, (*masks, f"train.max_tokens_per_mb={longest}"))
    masked = learner(lm, small_config(*masks)).step(rows).values["masked_tokens"]
    assert 0 < masked < sum(len(row.response_ids) for row in rows)


def test_log_probs_of_before_the_step_are_those_of_its_own_pass(lm: Any) -> None:
    config = small_config("algorithm.old_logprobs=recompute", *FREE, "train.max_tokens_per_mb=60")
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    given = copy.deepcopy(rows)
    for row, values in zip(given, learner(lm, config).logprobs(given), strict=True):
        row.old_logprobs = values

    expected, told = gradients(learner(lm, config), given)
    found, seen = gradients(learner(lm, config), rows)

    assert relative_difference(found, expected) <= 1e-6  # decoupled PPO's first minibatch needs no pass beforehand
    assert seen.values["importance_weight"] == 1.0
    assert seen.values["mismatch_kl"] == pytest.approx(told.values["mismatch_kl"], rel=1e-6)
    assert seen.values["mismatch_kl"] > 0


def test_the_order_of_rows_does_not_matter(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    config = small_config(*FREE, "train.max_tokens_per_mb=64")
    expected, _ = gradients(learner(lm, config), rows)

    for seed in range(3):
        mixed = random.Random(seed).sample(rows, len(rows))
        assert mixed != rows
        assert relative_difference(gradients(learner(lm, config), mixed)[0], expected) <= 1e-5


def test_rows_of_weight_zero_change_nothing(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 7, lm.config.vocab_size))
    padding = off_policy(sampled_rows(lm, 4, lm.config.vocab_size, seed=8))
    for row in padding:
        row.weight = 0.0
    config = small_config(*FREE)

    expected, without = gradients(learner(lm, config), rows)
    found, stats = gradients(learner(lm, config), [*padding[:2], *rows, *padding[2:]])

    # More rows make other matrix shapes, whose sums are rounded in another order.
    assert relative_difference(found, expected) <= 1e-5
    for name in without.values.keys() - {"trained_rows"}:
        assert stats.values[name] == pytest.approx(without.values[name], rel=1e-5, abs=1e-6), name


def test_the_chunk_of_logits_does_not_matter(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    assert sum(len(row.response_ids) for row in rows) > 30

    same_gradients(lm, rows, ("train.logprob_chunk=7",), ("train.logprob_chunk=4096",))


def test_gradient_checkpointing_does_not_matter_and_recomputes(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = off_policy(sampled_rows(lm, 6, lm.config.vocab_size))
    tokens = sum(row.num_tokens for row in rows)
    monkeypatch.setattr(chunks, "CHUNK", -(-tokens // 3))
    forwards = {"none": 0, "selective": 0, "full": 0, "chunked": 0, "offloaded": 0}
    found = {}
    for kind in forwards:
        one = learner(lm, small_config(*FREE, f"model.gradient_checkpointing={kind}"))

        def count(*_: Any, kind: str = kind) -> None:
            forwards[kind] += 1

        one.policy.lm.model.layers[0].mlp.up_proj.register_forward_pre_hook(count)
        found[kind], _ = gradients(one, rows)

    # Three pieces, each computed as often as the whole.
    assert forwards == {"none": 1, "selective": 2, "full": 2, "chunked": 6, "offloaded": 6}
    assert all(relative_difference(found[kind], found["none"]) <= 1e-6 for kind in forwards)


def test_rows_that_are_longer_than_a_micro_batch_give_the_gradients_of_one_that_holds_all(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 9, lm.config.vocab_size))
    middle = sorted(row.num_tokens for row in rows)[4]
    name = (f"train.max_tokens_per_mb={max(16, middle)}",)

    same_gradients(lm, rows, name, ())
    assert learner(lm, small_config(*name)).step(rows).values["micro_batches"] > 4  # four longer ones are alone


def test_rows_without_advantage_stay_in_the_denominator_only(lm: Any) -> None:
    """Leaving them out of the computation gives the gradient of computing them."""
    rows = off_policy(sampled_rows(lm, 8, lm.config.vocab_size))
    for row in rows[::2]:
        row.advantage = 0.0
    config = small_config(*FREE, "algorithm.name=dr_grpo")

    found, stats = gradients(learner(lm, config), rows)

    assert relative_difference(found, reference_gradients(lm, rows, config)[0]) <= 1e-5
    assert stats.values["trained_rows"] == 4


def test_gradients_are_clipped_to_the_norm(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 6, lm.config.vocab_size))
    free, before = gradients(learner(lm, small_config(*FREE)), rows)
    norm = float(torch.stack([g.norm() for g in free.values()]).norm())

    clipped, stats = gradients(learner(lm, small_config(f"train.grad_clip={norm / 4}")), rows)

    assert before.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert stats.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert relative_difference({n: 4 * g for n, g in clipped.items()}, free) <= 1e-4


def test_the_step_is_adamw_with_decay_on_matrices_only(lm: Any) -> None:
    rows = off_policy(sampled_rows(lm, 6, lm.config.vocab_size))
    rate = "train.learning_rate=0.01"
    # An enormous epsilon leaves almost nothing of the gradient's part: what moves is decay.
    one = learner(lm, small_config(rate, "train.weight_decay=0.5", "train.eps=1e12"))
    before = parameters(one)

    one.step(rows)

    for name, value in parameters(one).items():
        factor = 1 - 0.01 * 0.5 if value.ndim >= 2 else 1.0
        assert torch.allclose(value, before[name] * factor, rtol=1e-5, atol=1e-8), name
