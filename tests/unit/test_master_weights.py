"""bfloat16 passes over float32 weights, on one rank: what is learned, sampled, written and numbered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    byte_tokenizer,
    full_logprobs,
    gradients,
    grouped_query_lm,
    learner,
    parameters,
    plain_copy,
    relative_difference,
    sampled_rows,
    small_config,
)
from safetensors.torch import load_file

from trainer.checkpoint.export import export
from trainer.rollout.sampler import refresh
from trainer.train.distributed import single_world
from trainer.train.logprobs import _WideScores
from trainer.train.model import copy_in

HALF = torch.bfloat16


def test_gradients_are_float32_sums_near_those_of_float32() -> None:
    lm = grouped_query_lm()
    rows = sampled_rows(lm, 9, lm.config.vocab_size)
    settings = ("train.grad_clip=1e9", "train.max_tokens_per_mb=64")
    expected, _ = gradients(learner(lm, small_config(*settings)), rows)

    found, stats = gradients(learner(lm, small_config(*settings), single_world(dtype=HALF)), rows)

    assert stats.values["micro_batches"] > 2
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert relative_difference(found, expected) <= 0.06  # bfloat16 has 8 bits


def test_steps_too_small_for_bfloat16_add_up() -> None:
    """A rate of 1e-6 never moves a bfloat16 weight of 0.1, whose neighbours are 5e-4 away; float32 weights it does."""
    lm = grouped_query_lm()
    rows = sampled_rows(lm, 5, lm.config.vocab_size)
    one = learner(lm, small_config("train.learning_rate=1e-6"), single_world(dtype=HALF))
    before = parameters(one)

    for _ in range(3):
        one.step(rows)

    moved = {name: (value - before[name]).abs() for name, value in parameters(one).items()}
    assert all(0 < float(change.max()) < 1e-5 for change in moved.values())
    rounded = [(before[n].to(HALF) == value.to(HALF)).flatten() for n, value in parameters(one).items()]
    assert float(torch.cat(rounded).float().mean()) > 0.9  # what a bfloat16 weight would not have seen


def test_logprobs_are_those_of_the_weights_that_sample() -> None:
    lm = grouped_query_lm()
    rows = sampled_rows(lm, 7, lm.config.vocab_size)
    one = learner(lm, small_config(), single_world(dtype=HALF))
    # Weights rounded to bfloat16, computed with in float64: what is left is the rounding of activations.
    plain = plain_copy(copy_in(lm, HALF))

    found = one.logprobs(rows)

    differences: list[float] = []
    for row, values in zip(rows, found, strict=True):
        exact = full_logprobs(plain, row.prompt_ids, row.response_ids)
        differences += (torch.tensor(values) - exact).abs().tolist()
    assert sum(differences) / len(differences) <= 0.03
    assert {p.dtype for p in one.policy.parameters()} == {torch.float32}  # what was gathered is given back


def test_scores_are_not_rounded_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(HALF) for shape in ((5, 64), (97, 64)))
    exact = hidden.double() @ weight.double().t()

    found = _WideScores.apply(hidden, weight)

    assert found.dtype == torch.float32
    assert float((found - exact).abs().max()) <= 1e-5
    assert float((exact.to(HALF) - exact).abs().max()) >= 1e-2


def test_the_replica_that_samples_has_the_new_weights_in_bfloat16() -> None:
    lm = grouped_query_lm()
    world = single_world(dtype=HALF)
    frequencies = lm.model.rotary_emb.inv_freq.clone()
    replica = copy_in(lm, HALF)
    rows = sampled_rows(lm, 5, lm.config.vocab_size)
    one = learner(lm, small_config("train.learning_rate=0.01"), world)
    one.step(rows)

    refresh(replica, one.policy, world)

    wanted = parameters(one)
    assert all(torch.equal(p, wanted[n].to(HALF)) for n, p in replica.named_parameters())
    assert torch.equal(replica.model.rotary_emb.inv_freq, frequencies)


def test_an_export_has_the_dtype_of_the_passes_and_says_so(tmp_path: Path) -> None:
    found: dict[torch.dtype, Any] = {}
    for dtype in (HALF, torch.float32):
        one = learner(grouped_query_lm(), small_config(), single_world(dtype=dtype))
        export(one, byte_tokenizer(), tmp_path / str(dtype))
        config = json.loads((tmp_path / str(dtype) / "config.json").read_text())
        weights = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert {w.dtype for w in weights.values()} == {dtype}
        assert config["dtype"] == str(dtype).removeprefix("torch.")
        found[dtype] = weights
    assert found[HALF].keys() == found[torch.float32].keys()
    assert all(torch.equal(found[HALF][n], w.to(HALF)) for n, w in found[torch.float32].items())


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_reference_is_not_trained(dtype: torch.dtype) -> None:
    twin = copy_in(grouped_query_lm(), dtype)
    assert {p.dtype for p in twin.parameters()} == {dtype}
    assert not any(p.requires_grad for p in twin.parameters())
