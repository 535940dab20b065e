"""Weights and optimizer state put away and fetched again. On a CPU the host's memory is other memory of the same kind;
what leaves a GPU, and several ranks: tests/gpu/test_training.py, tests/unit/test_sharded_loading.py.
"""

from __future__ import annotations

import pytest
import torch
from builders import grouped_query_lm, learner, sampled_rows, small_config

from trainer.train.distributed import local_part, single_world
from trainer.train.learner import Learner

FAST = "train.learning_rate=1e-2"


def places(one: Learner) -> list[int]:
    """Addresses of all weights and of the optimizer's moments."""
    moments = [value for state in one.optimizer.state.values() for value in state.values() if value.ndim]
    return [local_part(tensor).data_ptr() for tensor in [*one.policy.parameters(), *moments]]


def none_stayed(before: list[int], after: list[int]) -> bool:
    return len(before) == len(after) and all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_put_away_and_fetched_learns_on_as_if_nothing_had_been(dtype: torch.dtype, tied: bool) -> None:
    lm = grouped_query_lm()
    if tied:
        lm.lm_head.weight = lm.model.embed_tokens.weight
    rows = sampled_rows(lm, 5, lm.config.vocab_size)
    world = single_world(dtype=dtype)
    one, other = (learner(lm, small_config(FAST), world) for _ in range(2))
    for each in (one, other):
        each.step(rows)
    before = places(one)
    identities = [id(parameter) for parameter in one.policy.parameters()]
    for _ in range(2):  # the second changes nothing
        one.host.put_state(one.optimizer)
        one.host.put_weights(one.policy)
    assert none_stayed(before, places(one))
    away = places(one)
    one.host.fetch_weights(one.policy, world.device)
    assert one.logprobs(rows) == other.logprobs(rows)  # beside a state that is still away
    one.host.fetch_state(one.optimizer, world.device)

    assert (one.policy.lm.lm_head.weight is one.policy.lm.model.embed_tokens.weight) == tied
    assert none_stayed(away, places(one))
    assert [id(parameter) for parameter in one.policy.parameters()] == identities
    for _ in range(2):
        assert one.step(rows).values == other.step(rows).values
    for mine, its in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(local_part(mine), local_part(its))


def test_a_learner_that_has_not_learned_yet_can_rest_too() -> None:
    lm = grouped_query_lm()
    rows = sampled_rows(lm, 5, lm.config.vocab_size)
    one, other = (learner(lm, small_config(FAST), single_world()) for _ in range(2))
    one.host.put_state(one.optimizer)
    one.host.put_weights(one.policy)
    assert one.step(rows).values == other.step(rows).values  # wakes
