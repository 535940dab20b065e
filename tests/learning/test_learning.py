"""Does it learn, and would we notice if it did not? Real runs of the tiny preset, and negative controls.

Everything is measured on held-out test tasks that no setting was chosen on (docs/learning.md). One seed and one
control are trained; CLUSTERKIT_LEARNING_TABLE=1 trains three of each. test_memory_learning.py is the short one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from learning.arms import CONTROLS, SEEDS, Outcomes

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    found = Outcomes(tmp_path_factory.mktemp("learning"))
    yield found
    found.show()


@pytest.mark.parametrize("seed", SEEDS)
def test_accuracy_rises_by_40_points_to_80_percent(outcomes: Outcomes, seed: int) -> None:
    row = outcomes(seed).row(0)

    assert row["after"] >= 0.80
    assert row["after"] - row["before"] >= 0.40


@pytest.mark.parametrize(("seed", "control"), CONTROLS)
def test_true_rewards_beat_a_control_by_20_points_at_the_same_step(outcomes: Outcomes, seed: int, control: str) -> None:
    true, other = outcomes(seed), outcomes(seed, control)

    assert true.summary["global_step"] == other.summary["global_step"]
    assert true.row(0)["before"] == other.row(0)["before"]  # the same warmed-up model
    assert true.row(0)["after"] - other.row(0)["after"] >= 0.20
    assert true.row(0)["sampled_after"] - other.row(0)["sampled_after"] >= 0.20


@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_memory_blanked_a_forced_answer_is_a_guess(outcomes: Outcomes, seed: int) -> None:
    outcome = outcomes(seed)
    chance = outcome.summary["chance"]

    # Four standard errors above a blind guess, over the tasks of the table.
    bound = chance + 4 * (chance * (1 - chance) / outcome.summary["num_tasks"]) ** 0.5
    assert outcome.row(0, blank=True)["after"] <= bound


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_learned_reaches_sixteen_times_the_trained_length(outcomes: Outcomes, seed: int) -> None:
    outcome = outcomes(seed)
    trained = outcome.summary["trained_chunks"][1]
    at_length, far = outcome.row(trained), outcome.row(16 * trained)

    assert far["after"] >= at_length["after"] - 0.10
    assert far["after"] - far["before"] >= 0.40


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_ratios_and_kl_stay_exact_throughout(outcomes: Outcomes, seed: int) -> None:
    steps = [r["stats"] for r in outcomes(seed).records if r["kind"] == "step"]
    stats = [s for s in steps if s["trained_tokens"]]

    assert len(stats) > 10
    assert max(s["behave_ratio_max_dev"] for s in stats) <= 2e-5  # the rounding of float32 log-probs
    assert max(abs(s["mismatch_kl"]) for s in stats) <= 1e-6
