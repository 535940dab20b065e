"""Does the structured memory's agent learn what to keep, and would we notice if it did not? Preset memalpha-tiny.

Measured on held-out test tasks; settings were chosen with another seed on the dev tasks (docs/memalpha.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from learning.arms import SEEDS, Arm, Outcome, run_each

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1800)]


def arm(seed: int, rewards: str) -> Arm:
    return Arm(seed, rewards, preset="memalpha-tiny", num_tasks=128)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    root: Path = tmp_path_factory.mktemp("memory")
    # The runs with true rewards come first: they make the warm-ups that the others find cached.
    arms = [arm(seed, rewards) for rewards in ("true", "shuffled") for seed in SEEDS]
    return run_each(arms, root)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_share_of_questions_that_the_memory_answers_rises_by_30_points(
    outcomes: dict[str, Outcome], seed: int
) -> None:
    row = outcomes[f"true-{seed}"].row(0)

    assert row["after"] - row["before"] >= 0.30
    assert row["after"] >= 0.80
    assert row["sampled_after"] - row["sampled_before"] >= 0.30


@pytest.mark.parametrize("seed", SEEDS)
def test_with_shuffled_rewards_it_does_not_rise(outcomes: dict[str, Outcome], seed: int) -> None:
    true, shuffled = outcomes[f"true-{seed}"], outcomes[f"shuffled-{seed}"]

    assert true.summary["global_step"] == shuffled.summary["global_step"]
    assert true.row(0)["before"] == shuffled.row(0)["before"]  # the same warmed-up model
    assert shuffled.row(0)["after"] - shuffled.row(0)["before"] <= 0.10
    assert true.row(0)["sampled_after"] - shuffled.row(0)["sampled_after"] >= 0.20


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_learned_reaches_four_times_the_trained_length(outcomes: dict[str, Outcome], seed: int) -> None:
    outcome = outcomes[f"true-{seed}"]
    trained = outcome.summary["trained_chunks"][1]

    assert outcome.row(4 * trained)["after"] >= outcome.row(0)["after"] - 0.10


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_ratios_stay_exact_throughout(outcomes: dict[str, Outcome], seed: int) -> None:
    stats = [r["stats"] for r in outcomes[f"true-{seed}"].records if r["kind"] == "step"]

    assert len(stats) >= 10
    # The rounding of float32 log-probs, which differs between processors: 1.03e-5 was seen on one (seed 11).
    assert max(s["behave_ratio_max_dev"] for s in stats) <= 2e-5


def test_summaries_for_the_documents(outcomes: dict[str, Outcome]) -> None:
    """Prints the table of docs/memalpha.md."""
    for name, outcome in sorted(outcomes.items()):
        cells = [
            f"{r['chunks']}{'b' if r['blank_memory'] else ''}: {r['before']:.3f}->{r['after']:.3f}"
            for r in outcome.summary["table"]
        ]
        first = outcome.summary["table"][0]
        print(f"{name:12} sampled {first['sampled_before']:.3f}->{first['sampled_after']:.3f}  {'  '.join(cells)}")
        assert outcome.summary["status"] == "completed"
