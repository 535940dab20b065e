"""Whether a run goes on, starts afresh, is refused or is over already."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SHORT_WARMUP, TOTAL_STEPS, Forks, NewTrial, Trial, assert_same_run, command, wait_for


@pytest.fixture(scope="module")
def completed(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, reference: Trial
) -> Callable[[], Trial]:
    trial = Trial(tmp_path_factory.mktemp("choice") / "trial", warm_cache, **{"train.total_steps": 5})
    assert forks.run(trial) == 0, trial.said()
    return trial.kept()


@pytest.fixture
def short(completed: Callable[[], Trial]) -> Trial:
    """A trial completed after 5 of the reference's steps."""
    return completed()


def _untouched(trial: Trial) -> dict[str, object]:
    return {
        "recover": trial.recover_files(),
        "records": trial.records(),
        "weights": trial.weights(),
        "summary": trial.summary(),
        "rollouts": {p.name: p.stat().st_mtime_ns for p in (trial.paths.logs / "rollouts").iterdir()},
    }


def test_other_settings_are_refused_and_shown(forks: Forks, short: Trial) -> None:
    before = _untouched(short)
    short.change(**{"train.learning_rate": 2e-3, "warmup.steps": 151, "train.total_steps": TOTAL_STEPS})

    assert forks.run(short) == 2

    said = short.said()
    assert said.startswith(
        "error: the recover checkpoint of step 5 was written with other settings or data (checkpoint -> now):"
    )
    assert ":\n  train.learning_rate: 0.001 -> 0.002\n  warmup.steps: 150 -> 151\n" in said
    assert "trial_name=NEW" in said
    assert "Traceback" not in said
    assert "  train.learning_rate: 0.001 -> 0.002\n" in short.log()
    assert _untouched(short) == before
    assert short.history().finish["status"] == "completed", "the refused start is no part of the run"


def test_a_longer_run_goes_on(forks: Forks, short: Trial, reference: Trial) -> None:
    assert (short.summary()["status"], short.summary()["global_step"]) == ("completed", 5)
    short.change(**{"train.total_steps": TOTAL_STEPS, "eval.num_tasks": 5, "rollout.max_batch_tokens": 8192})
    assert forks.run(short) == 0, short.said()
    assert [r["resume_step"] for r in short.records("attempt")] == [0, 5]
    assert short.summary()["global_step"] == TOTAL_STEPS
    assert short.summary()["parameter_sha256"] == reference.summary()["parameter_sha256"]
    assert short.trained_tasks() == reference.trained_tasks()


def test_a_shorter_run_ends_with_a_checkpoint(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(checkpoint={"save_freq_steps": 0})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 3)
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130
    done = len(trial.records("step"))
    trial.change(**{"train.total_steps": done - 1})
    assert forks.run(trial) == 0, trial.said()
    assert trial.summary()["global_step"] == done
    assert list(trial.weights()) == [f"epoch1epochstep{done}globalstep{done}"]
    assert trial.summary()["checkpoint"].endswith(f"globalstep{done}")


def test_a_complete_run_is_left_alone(forks: Forks, short: Trial) -> None:
    before = _untouched(short)
    for total in (5, 3):
        short.change(**{"train.total_steps": total})
        assert forks.run(short) == 0
        assert short.said() == (
            "small/run1 is complete (5 steps): nothing is left to train. A larger train.total_steps trains on.\n"
        )
        assert _untouched(short) == before


def test_completeness_by_epochs(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(**{"train.total_steps": 0, "task.train_size": 8, **SHORT_WARMUP})
    assert forks.run(trial) == 0, trial.said()
    assert trial.summary()["global_step"] == 2
    assert forks.run(trial) == 0
    assert "is complete (2 steps)" in trial.said()
    trial.change(**{"train.total_epochs": 2})
    assert forks.run(trial) == 0, trial.said()
    assert [r["resume_step"] for r in trial.records("attempt")] == [0, 2]
    assert trial.summary()["global_step"] == 4


def test_killed_before_its_closing_table_a_run_still_gets_one(forks: Forks, short: Trial) -> None:
    summary = short.summary()
    (short.paths.logs / "summary.json").unlink()
    steps = len(short.records("step"))
    assert forks.run(short) == 0, short.said()
    assert short.summary()["parameter_sha256"] == summary["parameter_sha256"]
    assert short.summary()["table"] == summary["table"]
    assert len(short.records("step")) == steps


@pytest.fixture
def in_table(forks: Forks, short: Trial) -> Trial:
    """A trial of 5 steps that was killed when two lines of its closing table were measured."""
    short.change(**{"eval.final_chunks": [3, 96], "train.total_steps": 5})
    (short.paths.logs / "summary.json").unlink()
    before = len(short.records("eval"))
    attempt = forks.start(short)
    assert attempt.reach(lambda: len(short.records("eval")) >= before + 2), short.said()
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    assert not (short.paths.logs / "summary.json").exists(), "it was over before it was killed"
    return short


def test_killed_within_its_closing_table_a_run_measures_only_what_is_missing(forks: Forks, in_table: Trial) -> None:
    before = in_table.records("eval")

    assert forks.run(in_table) == 0, in_table.said()

    again = in_table.records("eval")[len(before) :]
    kept = [r for r in again if not r["seconds"]]
    assert 2 <= len(kept) < len(again) == 3
    assert [r["accuracy"] for r in kept[:2]] == [r["accuracy"] for r in before[-2:]]
    assert f"Of the closing table {len(kept)} of 3 lines are there already." in in_table.log()
    assert not (in_table.paths.logs / "after.json").exists()
    table = in_table.summary()["table"]
    (in_table.paths.logs / "summary.json").unlink()
    assert forks.run(in_table) == 0, in_table.said()
    assert in_table.summary()["table"] == table
    assert all(r["seconds"] for r in in_table.records("eval")[len(before) + len(again) :])


def test_a_run_that_starts_afresh_measures_its_closing_table_anew(forks: Forks, in_table: Trial) -> None:
    before = in_table.records("eval")
    in_table.change(recover_mode="disabled")

    assert forks.run(in_table) == 0, in_table.said()

    again = [r for r in in_table.records("eval")[len(before) :] if r["name"] == "after"]
    assert len(again) == 3
    assert all(r["seconds"] for r in again)


def test_resume_demands_a_checkpoint(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(recover_mode="resume")
    assert forks.run(trial) == 2
    assert trial.said().startswith(f"error: there is no whole recover checkpoint under {trial.paths.recover}\n")
    assert "recover_mode=disabled" in trial.said()
    assert trial.records() == []
    assert list(trial.paths.recover.iterdir()) == []


def test_disabled_starts_afresh_and_keeps_the_old_checkpoint_until_it_has_its_own(
    forks: Forks, short: Trial, reference: Trial
) -> None:
    old = short.recover_files()
    short.change(recover_mode="disabled", checkpoint={"ckpt_first_step": 4}, **{"train.total_steps": TOTAL_STEPS})

    attempt = forks.start(short)
    assert attempt.reach(lambda: len(short.records("step")) >= 5 + 2)
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    assert short.recover_files() == old
    (told,) = [r["message"] for r in short.records("warning")]
    assert told == (
        f"recover_mode=disabled: starting afresh; the earlier recover checkpoint under {short.paths.recover} is kept "
        "until this run writes its own"
    )
    assert not (short.paths.logs / "summary.json").exists(), "the closing table was that of the earlier run"

    attempt = forks.start(short)
    assert attempt.reach(lambda: short.records("recover")[-1]["global_step"] == 4)
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    # The earlier run had gone further; its checkpoint must not be taken for this run's.
    short.change(recover_mode="auto")
    assert forks.run(short) == 0, short.said()
    assert [r["resume_step"] for r in short.records("attempt")] == [0, 0, 0, 4]
    assert_same_run(short, reference, more=frozenset({"epoch1epochstep5globalstep5"}))


def test_disabled_and_interrupted_says_how_to_go_on(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(recover_mode="disabled")
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 2)
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130
    assert "the same command without recover_mode=disabled goes on from there" in trial.said()


def test_two_trainers_of_one_trial(new_trial: NewTrial, forks: Forks, reference: Trial) -> None:
    trial = new_trial()
    first = forks.start(trial)
    assert first.reach(lambda: trial.records("attempt"))
    first.send(signal.SIGSTOP)
    records, log = trial.records(), trial.log()
    try:
        second = command(trial, stderr=subprocess.PIPE)
        out, err = second.communicate(timeout=300)
        assert (second.returncode, out) == (2, "")
        assert err == (
            f"error: small/run1 is already running (process {first.pid}): `clusterkit status` shows it; "
            "trial_name=NEW starts another one\n"
        )
        assert (trial.records(), trial.log()) == (records, log)
    finally:
        first.send(signal.SIGCONT)
    assert first.end() == 0
    assert wait_for(lambda: trial.records("finish"))
    assert_same_run(trial, reference)
