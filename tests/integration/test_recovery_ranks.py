"""Two ranks: the same run as one; a lost rank ends all with a message; checkpoints fit any number of ranks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import ENVIRONMENT, TOTAL_STEPS, Attempt, Forks, NewTrial, Trial, assert_same_run, command, wait_for
from safetensors.torch import load

from clusterkit.runs.trace.heldout import heldout_tasks
from clusterkit.runs.trials import choose_trial

TOLERANCE = 1e-5
FIRST, LAST = "epoch1epochstep4globalstep4", f"epoch2epochstep6globalstep{TOTAL_STEPS}"


@pytest.fixture(scope="module")
def two_ranks(forks: Forks, tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, reference: Trial) -> Trial:
    """The reference's run, made by two ranks that nothing disturbed."""
    assert reference.summary()["status"] == "completed"  # the warm-up is in the cache
    trial = Trial(tmp_path_factory.mktemp("two"), warm_cache, **{"train.ranks": 2})
    assert forks.run(trial) == 0, trial.said()
    return trial


def _ranks(attempt: Attempt) -> list[psutil.Process]:
    """The ranks' processes, in order of rank."""
    children = psutil.Process(attempt.pid).children()
    return sorted((p for p in children if "trainer.launch.rank" in " ".join(p.cmdline())), key=lambda p: p.pid)


def _gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _assert_close(trial: Trial, other: Trial) -> None:
    ours, theirs = load(trial.weights()[LAST]), load(other.weights()[LAST])
    assert ours.keys() == theirs.keys()
    difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    assert difference <= TOLERANCE
    assert trial.trained_tasks() == other.trained_tasks()


def test_log_probs_are_compared_once_before_the_first_step(reference: Trial, two_ranks: Trial) -> None:
    for trial in (reference, two_ranks):
        before, _, after = trial.log().partition("Log-probs are the model's own")
        assert "Epoch" in after
        assert "Epoch" not in before
        assert "Log-probs are" not in after


def test_two_ranks_make_the_run_of_one(two_ranks: Trial, reference: Trial) -> None:
    _assert_close(two_ranks, reference)
    early, learned = (load(two_ranks.weights()[name]) for name in (FIRST, LAST))
    moved = max(float((learned[name] - early[name]).abs().max()) for name in early)
    assert moved > 100 * TOLERANCE, "weights that hardly moved would be equal whatever the ranks did"
    rewards = [[s["stats"]["task_reward"] for s in trial.history().steps] for trial in (two_ranks, reference)]
    assert rewards[0] == rewards[1]
    assert {r["ranks"] for r in two_ranks.records("attempt")} == {2}
    assert two_ranks.records("finish")[-1]["global_step"] == TOTAL_STEPS
    one, two = (heldout_tasks(choose_trial(t.config, named_by_user=True).run) for t in (reference, two_ranks))
    assert [(task.task, task.before) for task in two] == [(task.task, task.before) for task in one]
    assert all(task.after is not None for task in two)


def test_a_rank_that_crashes_leaves_where_it_was(forks: Forks, new_trial: NewTrial, two_ranks: Trial) -> None:
    trial = new_trial(**{"train.ranks": 2})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 2), trial.said()
    _ranks(attempt)[1].send_signal(signal.SIGABRT)
    assert attempt.end() == 1
    assert (
        "rank 1 of 2 was ended by signal 6, SIGABRT (what each of its threads did is in main.log); the same command"
    ) in trial.said()
    told = trial.log().partition("Fatal Python error: Aborted")[2]
    assert "most recent call first" in told
    assert " in rank_main" in told
    assert two_ranks.summary()["status"] == "completed"


@pytest.mark.long
def test_a_killed_rank_and_a_killed_parent(forks: Forks, new_trial: NewTrial, two_ranks: Trial) -> None:
    trial = new_trial(**{"train.ranks": 2})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 3), trial.said()
    _ranks(attempt)[1].kill()
    assert attempt.end() == 1
    assert trial.said() == (
        "error: rank 1 of 2 was ended by signal 9, SIGKILL (often the kernel, out of memory); the same command goes on "
        "from the last recover checkpoint\n"
    )
    assert "ERROR: rank 1 of 2 was ended by signal 9" in trial.log()
    assert trial.records("finish")[-1]["status"] == "failed"

    attempt = forks.start(trial)
    before = len(trial.records("step"))
    assert attempt.reach(lambda: len(trial.records("step")) >= before + 2), trial.said()
    ranks = _ranks(attempt)
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    # Ranks that lived on would write into the next attempt's files.
    assert wait_for(lambda: all(map(_gone, ranks)))
    assert len(ranks) == 2

    assert forks.run(trial) == 0, trial.said()
    resumed = [r["resume_step"] for r in trial.records("attempt")]
    assert 0 < resumed[1] < resumed[2] < TOTAL_STEPS
    assert_same_run(trial, two_ranks)


def test_a_killed_trainers_folder_in_tmpdir_goes_away_with_the_next_start(new_trial: NewTrial, tmp_path: Path) -> None:
    trial, folder = new_trial(**{"train.ranks": 2, "train.total_steps": 1}), tmp_path / "tmp"
    folder.mkdir()
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    found = lambda: list(folder.glob("clusterkit-*"))  # noqa: E731
    with command(trial, env=environment) as process:
        wait_for(lambda: found() or process.poll() is not None)
        process.kill()
    (left,) = found()

    with command(trial, env=environment) as process:
        _, err = process.communicate(timeout=300)

    assert process.returncode == 0, err
    assert not left.exists()
    assert found() == []


def test_rank_0_is_killed_in_the_middle_of_a_step(forks: Forks, new_trial: NewTrial, two_ranks: Trial) -> None:
    """It has the rollouts, the records and the checkpoint's other half: the run goes on to the same weights."""
    trial = new_trial(**{"train.ranks": 2})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 3), trial.said()
    _ranks(attempt)[0].kill()  # it is at step 4, whose record is not there yet
    assert attempt.end() == 1
    assert "rank 0 of 2 was ended by signal 9, SIGKILL" in trial.said()
    made = len(trial.records("step"))
    assert made < TOTAL_STEPS

    assert forks.run(trial) == 0, trial.said()
    assert [record["resume_step"] for record in trial.records("attempt")][1] in range(2, made + 1)
    assert_same_run(trial, two_ranks)


def test_from_two_ranks_to_one(forks: Forks, new_trial: NewTrial, reference: Trial) -> None:
    trial = new_trial(**{"train.ranks": 2, "checkpoint.ckpt_freq_secs": 3600.0})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("step")) >= 4), trial.said()
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130, trial.said()
    done = trial.records("step")[-1]["global_step"]
    assert f"interrupted after step {done}: a recover checkpoint of step {done} is written" in trial.said()
    assert trial.records("finish")[-1]["global_step"] == done

    trial.change(**{"train.ranks": 1})
    assert forks.run(trial) == 0, trial.said()
    assert [(r["ranks"], r["resume_step"]) for r in trial.records("attempt")] == [(2, 0), (1, done)]
    _assert_close(trial, reference)


def test_from_one_rank_to_two(forks: Forks, new_trial: NewTrial, reference: Trial) -> None:
    trial = new_trial(**{"train.ranks": 1})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(trial.records("recover")) >= 5)
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL

    trial.change(**{"train.ranks": 2})
    assert forks.run(trial) == 0, trial.said()
    assert [r["ranks"] for r in trial.records("attempt")] == [1, 2]
    assert trial.records("attempt")[-1]["resume_step"] >= 5
    _assert_close(trial, reference)


def test_a_signal_while_the_ranks_start(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(**{"train.ranks": 2})
    attempt = forks.start(trial)
    assert attempt.reach(lambda: len(_ranks(attempt)) == 2)
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130, trial.said()
    assert trial.said().startswith("error: interrupted after step 0: no step was finished yet")
    assert trial.records("step") == []


def test_a_signal_within_the_closing_table_stops_ranks_between_its_lines(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(
        **{"train.ranks": 2, "train.total_steps": 1, "eval.final_chunks": [96, 100, 104, 108]}
    )  # long lines after a short one

    def lines() -> list[dict[str, Any]]:
        return [r for r in trial.records("eval") if r["name"] == "after"]

    attempt = forks.start(trial)
    assert attempt.reach(lambda: lines() != []), trial.said()
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130, trial.said()
    assert trial.said().startswith("error: interrupted after step 1: a recover checkpoint of step 1 is written")
    done = len(lines())
    assert done < 5

    assert forks.run(trial) == 0, trial.said()
    assert [bool(r["seconds"]) for r in lines()[done:]] == [False] * done + [True] * (5 - done)
    assert len(trial.summary()["table"]) == 5


def test_a_rank_that_fails_is_named_and_its_traceback_kept(forks: Forks, new_trial: NewTrial) -> None:
    trial = new_trial(**{"train.ranks": 2})
    # A folder in the way of a file that rank 0 writes every step.
    (trial.paths.logs / "rollouts" / "step_1.jsonl.zst").mkdir(parents=True)
    assert forks.run(trial) == 1
    assert trial.said().startswith("error: rank 0 of 2 failed: IsADirectoryError: ")
    assert "Traceback" not in trial.said()
    assert "ERROR: rank 0:\nTraceback (most recent call last):" in trial.log()
    assert [r["status"] for r in trial.records("finish")] == ["failed"]
