"""Responses that the sequence mask rejects: out of the loss, and out of its denominator where that is wanted."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from builders import learner, small_config, small_parts

from trainer.base_run import Attempt, SteppedRun
from trainer.checkpoint.start import Start
from trainer.loop import TrainingRun
from trainer.metrics import Monitor
from trainer.rollout.batch import make_batch
from trainer.train.distributed import single_world
from trainer.types import Group, Row

PARTS = small_parts()
MASK = ("algorithm.old_logprobs=recompute", "algorithm.sequence_mask=max", "train.minibatches=2")


class Run(TrainingRun):
    """The part of a run that learns from a step's groups; the learner is real, nothing is sampled."""

    def __init__(self, folder: Path, *settings: str) -> None:
        folder.mkdir(exist_ok=True)
        config = small_config(f"fileroot={folder}", *MASK, *settings)
        attempt = Attempt(config, folder, single_world(), Monitor(folder, 1), lambda: False, Start(None))
        SteppedRun.__init__(self, attempt)
        self.learner = learner(copy.deepcopy(PARTS.lm), config)
        self.reference = copy.deepcopy(self.learner.policy) if config.algorithm.kl_coef else None
        self.seen: list[list[Row]] = []

    def _optimize(self, minibatches: list[list[Row]], number: int):
        self.seen = copy.deepcopy(minibatches)
        return super()._optimize(minibatches, number)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        return self._learn(groups, 1)[1].values

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.learner.policy.parameters()]


def groups(drifted: int = 3) -> list[Group]:
    """Rollouts of which some turns, in both minibatches, came from an engine that was far off."""
    found = PARTS.rollouts()
    for group in (found[0], found[2]):
        for one in group.trajectories[:drifted]:
            sampled = one.turns[0].completion
            sampled.logprobs[:] = [p - 3 for p in sampled.logprobs]
    return found


def denominator(rows: list[Row]) -> float:
    return 1 / rows[0].weight


def test_their_tokens_stay_in_the_denominator_unless_asked_otherwise(tmp_path: Path) -> None:
    everything, kept = Run(tmp_path / "all"), Run(tmp_path / "kept", "algorithm.mask_denominator=kept")
    everything.learn(groups())
    numbers = kept.learn(groups())

    for all_rows, rows in zip(everything.seen, kept.seen, strict=True):
        tokens = sum(len(row.response_ids) for row in all_rows)
        left = sum(len(row.response_ids) for row in rows)
        assert denominator(all_rows) == pytest.approx(tokens)
        assert left < tokens
        assert denominator(rows) == pytest.approx(left)
        assert all(max(abs(p) for p in row.behave_logprobs) < 50 for row in rows)
    gone = [sum(len(row.response_ids) for rows in run.seen for row in rows) for run in (everything, kept)]
    assert numbers["masked_tokens"] == gone[0] - gone[1]


@pytest.mark.parametrize("norm", ["token", "trajectory_mean", "constant"])
def test_a_step_over_what_is_kept_is_a_step_that_never_saw_the_rest(norm: str, tmp_path: Path) -> None:
    settings = (f"algorithm.loss_norm={norm}", "algorithm.kl_coef=0.1")
    one = Run(tmp_path / "one", *settings, "algorithm.mask_denominator=kept")
    one.learn(groups())

    two = Run(tmp_path / "two", *settings)
    two._optimize(copy.deepcopy(one.seen), 1)

    assert all(torch.equal(a, b) for a, b in zip(one.weights(), two.weights(), strict=True))


def test_the_gradient_of_the_others_is_larger_by_what_left_the_denominator(tmp_path: Path) -> None:
    settings = ("train.minibatches=1", "train.grad_clip=1e9")
    norms = []
    for name, way in (("a", "all"), ("b", "kept")):
        run = Run(tmp_path / name, *settings, f"algorithm.mask_denominator={way}")
        norms.append((run.learn(groups())["grad_norm"], denominator(run.seen[0])))

    (gradient_of_all, all_tokens), (gradient_of_kept, kept_tokens) = norms
    assert gradient_of_kept / gradient_of_all == pytest.approx(all_tokens / kept_tokens, rel=1e-4)
    assert kept_tokens < all_tokens


def test_the_first_minibatch_is_decided_before_its_weights_are(tmp_path: Path) -> None:
    """Without it, log-probs of the first minibatch are those of its own pass: too late for a denominator."""
    plain, kept = Run(tmp_path / "plain"), Run(tmp_path / "kept", "algorithm.mask_denominator=kept")
    plain.learn(groups())
    kept.learn(groups())

    assert all(row.old_logprobs is None for row in plain.seen[0])
    assert all(row.old_logprobs is not None for row in kept.seen[0])


def test_a_step_of_which_everything_is_rejected_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "algorithm.mask_denominator=kept")
    far = PARTS.rollouts()
    for turn in (turn for group in far for one in group.trajectories for turn in one.turns):
        turn.completion.logprobs[:] = [p - 9 for p in turn.completion.logprobs]
    before = run.weights()
    tokens = sum(len(r.response_ids) for rows in make_batch(far, run.config, 1).minibatches for r in rows)

    numbers = run.learn(far)

    assert numbers["masked_tokens"] == tokens
    assert all(torch.equal(a, b) for a, b in zip(before, run.weights(), strict=True))
    assert all(math.isfinite(value) for value in numbers.values())
