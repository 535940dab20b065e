"""Attempts, restarts and checkpoints as a log tells them: what was undone does not count."""

from __future__ import annotations

import pytest
from areal_lines import BEGIN, master, v2_stats, v2_step, v2_steps

from clusterkit.runs.log.progress import LogHistory
from clusterkit.runs.log.scan import LogScanner

DUMP = "Dumped recover info to file."


def told(text: str) -> LogHistory:
    scanner = LogScanner()
    scanner.feed(text.encode())
    return scanner.history


def test_a_step_that_comes_again_begins_an_attempt_and_undoes_what_followed() -> None:
    history = told(v2_steps(1, 9) + v2_steps(6, 7, at=2000.0))

    assert [step["global_step"] for step in history.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step["attempt"] for step in history.steps] == [1, 1, 1, 1, 1, 2, 2]
    assert history.stat("task_reward") == [n / 100 for n in range(1, 8)]
    assert (history.attempt, history.attempts[-1]["resume_step"]) == (2, 5)


@pytest.mark.parametrize(
    "line",
    [
        "Recovering from previous run. Epoch: 1, Epoch Step: 6 Global Step: 6.",
        "Training will start from: epoch 1 epoch step 6 global step 6.",
        "Will recover from: StepInfo(epoch=0, epoch_step=5, global_step=5)",
    ],
)
def test_an_attempt_that_says_where_it_goes_on_undoes_the_rest_at_once(line: str) -> None:
    history = told(v2_steps(1, 9) + master(line, 2000.0))

    assert history.global_step == 5
    assert (history.attempt, history.attempts[-1]["resume_step"]) == (2, 5)


def test_all_that_one_restart_says_is_one_attempt() -> None:
    text = v2_steps(1, 9)
    text += master(
        "Recovering from error job lost after 10 seconds. Recover count: 1, total recover count 10", 950, "WARNING"
    )
    text += master("Training will start from: epoch 1 epoch step 6 global step 6.", 965.0)
    text += master("Recovering from previous run. Epoch: 1, Epoch Step: 6 Global Step: 6.", 970.0)
    history = told(text + v2_steps(6, 7, at=2000.0))

    assert (history.attempt, history.attempts[-1]["resume_step"], history.global_step) == (2, 5, 7)
    assert [record["message"] for record in history.restarts] == ["job lost"]


def test_ten_restarts_without_a_step_are_ten_attempts_more() -> None:
    failing = [
        master(
            f"Recovering from error out of memory after 10 seconds. Recover count: {n}, total recover count 10",
            n,
            "WARNING",
        )
        for n in range(1, 11)
    ]
    history = told(v2_steps(1, 2) + "".join(failing))

    assert (history.attempt, len(history.restarts), history.global_step) == (11, 10, 2)


def test_from_scratch_after_all() -> None:
    scratch = (
        "Invalid recover checkpoint when recover_mode='auto'. Running the experiment from scratch with fault tolerance."
    )
    history = told(v2_steps(1, 4) + master(scratch, 950.0, "WARNING") + v2_steps(1, 2, at=1000.0))

    assert [step["attempt"] for step in history.steps] == [2, 2]
    assert history.attempts[-1]["resume_step"] == 0


def test_areals_word_on_where_it_would_recover_belongs_to_its_dump() -> None:
    point = "Will recover from: StepInfo(epoch=0, epoch_step=2, global_step=2)"
    history = told(v2_steps(1, 2) + master(DUMP, 200.1) + master(point, 200.1) + v2_steps(3, 3))

    assert history.attempt == 1
    assert history.recovers[0]["global_step"] == 2


def test_our_word_on_where_it_recovers_begins_an_attempt() -> None:
    point = "Will recover from: StepInfo(epoch=1, epoch_step=2, global_step=2)"
    history = told(v2_steps(1, 2) + master(DUMP, 200.1) + master(point, 230.0) + v2_steps(3, 3))

    assert (history.attempt, history.attempts[-1]["resume_step"], history.global_step) == (2, 2, 3)


def test_statistics_of_a_step_that_was_cut_off_are_not_those_of_the_next_attempt() -> None:
    text = v2_steps(1, 2) + v2_stats(299.0, task_reward=-1.0, lost=1.0)
    history = told(text + master("Recovering from previous run. Epoch: 1, Epoch Step: 3 Global Step: 3.", 400.0))
    assert "lost" not in told(text + v2_steps(3, 3, at=400.0)).steps[-1]["stats"]
    assert history.global_step == 2


def test_a_log_that_was_concatenated_twice_is_told_once() -> None:
    once = v2_steps(1, 5)

    assert told(once + once).steps == told(once).steps
    assert told(once + once).attempt == 1


def test_a_log_that_begins_in_the_middle() -> None:
    history = told(v2_steps(41, 45))

    assert (history.global_step, history.attempt, history.total_steps) == (45, 1, 50)
    assert history.eta() == pytest.approx(500.0)


def test_the_estimate_of_a_fresh_attempt_comes_from_the_ones_before() -> None:
    history = told(v2_steps(1, 9, seconds=40.0) + v2_step(6, 2000.0, seconds=41.0))

    assert history.eta() == pytest.approx(44 * 40.0)


def test_a_clock_that_is_set_back_neither_mixes_statistics_nor_makes_an_attempt() -> None:
    history = told(v2_steps(1, 5) + v2_steps(6, 7, at=-3600.0))

    assert history.attempt == 1
    assert history.stat("task_reward") == [n / 100 for n in range(1, 8)]
    assert history.last_time == BEGIN.timestamp() - 3600 + 700


def test_limits_hold_for_a_log_of_nothing_but_messages() -> None:
    text = master(DUMP, 1.0) * 3000 + master("broken", 1.0, "ERROR").replace("master worker", "model worker") * 3000
    history = told(text)

    assert history.recover_count == 3000
    assert max(len(history.recovers), len(history.errors), len(history.events)) <= 200
