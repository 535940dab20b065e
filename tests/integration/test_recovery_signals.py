"""SIGTERM and SIGINT: what is done is kept, exit 130, and the same command goes on to the same weights."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from runs import ENVIRONMENT, REPOSITORY, TOTAL_STEPS, Forks, NewTrial, Trial, assert_same_run, command, wait_for

from trainer.checkpoint.recover import RecoverStore
from trainer.config import flatten
from trainer.paths import cache_folder

SIGNALS = [signal.SIGINT, signal.SIGTERM]


MOMENTS: dict[str, Callable[[Trial], bool]] = {
    "before_the_first_step": lambda trial: bool(trial.records("attempt")),
    "in_a_step": lambda trial: len(trial.records("step")) >= 3,
    "in_a_recover_checkpoint": lambda trial: len(trial.records("step")) >= 2 and any(trial.paths.recover.glob("*.tmp")),
    "in_an_export": lambda trial: any(trial.paths.checkpoints.glob("*.tmp")),
}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_while_training(
    forks: Forks, new_trial: NewTrial, reference: Trial, moment: str, number: signal.Signals
) -> None:
    # By time only: what is kept at the stop is kept because of the stop.
    trial = new_trial(checkpoint={"ckpt_freq_secs": 3600.0, "ckpt_first_step": 2})
    attempt = forks.start(trial)
    assert attempt.reach(partial(MOMENTS[moment], trial)), trial.said()
    attempt.send(number)

    assert attempt.end() == 130
    done = len(trial.records("step"))
    assert trial.records("finish")[-1]["status"] == "interrupted"
    assert trial.records("finish")[-1]["global_step"] == done
    slot, problems = RecoverStore(trial.paths.recover).newest()
    assert problems == []
    assert (slot.state.global_step if slot else 0) == done
    kept = f"a recover checkpoint of step {done} is written" if done else "no step was finished yet"
    assert trial.said() == f"error: interrupted after step {done}: {kept}; the same command goes on from there\n"

    assert forks.run(trial) == 0, trial.said()
    assert trial.records("attempt")[-1]["resume_step"] == done
    assert len(trial.records("step")) == TOTAL_STEPS, "no step was made twice"
    assert_same_run(trial, reference)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_stopped_in_the_warmup(forks: Forks, tmp_path: Path, reference: Trial, number: signal.Signals) -> None:
    trial = Trial(tmp_path / "trial", tmp_path / "cold")
    for phase in ("recall", "sft"):
        attempt = forks.start(trial)
        assert attempt.reach(lambda phase=phase: any(r["phase"] == phase for r in trial.records("warmup")))
        attempt.send(number)
        assert attempt.end() == 130
        # Ctrl-C reaches the trainer as SIGTERM: a name of a signal would be another one than the user's.
        assert "error: interrupted during the warm-up: its state is written" in trial.said()
        assert list((cache_folder(trial.config) / "warmup").glob("*.partial"))

    seen = len(trial.records("warmup"))
    assert forks.run(trial) == 0, trial.said()
    assert {r["phase"] for r in trial.records("warmup")[seen:]} == {"sft", "gate"}, "recall practice was over"
    assert_same_run(trial, reference)


def test_stopped_while_evaluating_after_a_step(forks: Forks, new_trial: NewTrial, reference: Trial) -> None:
    # So many tasks that the evaluation of step 5 lasts a while.
    trial = new_trial(**{"eval.num_tasks": 3000, "checkpoint.ckpt_freq_secs": 3600.0})
    attempt = forks.start(trial)
    assert attempt.reach((trial.paths.logs / "rollouts" / "step_5.jsonl.zst").exists)
    attempt.send(signal.SIGTERM)
    assert attempt.end() == 130
    assert [s["global_step"] for s in trial.records("step")] == [1, 2, 3, 4, 5]

    trial.change(**{"eval.num_tasks": 4})
    assert forks.run(trial) == 0, trial.said()
    evaluations = [r["global_step"] for r in trial.records("eval") if r["name"] == "heldout"]
    assert evaluations == [5, 10], "the evaluation that was given up is made up for"
    assert_same_run(trial, reference)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_a_signal_during_the_imports_is_heeded(
    new_trial: NewTrial, forks: Forks, reference: Trial, number: signal.Signals
) -> None:
    trial = new_trial()
    process = command(trial)
    wait_for(lambda: b"libtorch" in Path(f"/proc/{process.pid}/maps").read_bytes())
    assert not (trial.paths.logs / "run.lock").exists(), "still importing"
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert "the same command goes on from there" in err
    assert trial.records("step") == []
    assert forks.run(trial) == 0, trial.said()
    assert_same_run(trial, reference)


@pytest.mark.parametrize("number", [pytest.param(SIGNALS[0], marks=pytest.mark.long), SIGNALS[1]], ids=lambda n: n.name)
def test_the_operator_passes_the_signal_on(new_trial: NewTrial, reference: Trial, number: signal.Signals) -> None:
    trial = new_trial(experiment_name="tiny-recall", **{"checkpoint.ckpt_freq_secs": 3600.0})
    # Every setting, so that the run is that of the reference whatever the preset says.
    settings = [f"{k}={v}" for k, v in flatten(trial.config).items() if v not in (None, "")]
    argv = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "tiny", "--no-progress", *settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(argv, env=ENVIRONMENT, cwd=REPOSITORY, **pipes)
    wait_for(lambda: len(trial.records("step")) >= 2 or process.poll() is not None)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    done = len(trial.records("step"))

    assert (process.returncode, out) == (130, ""), err
    assert f"a recover checkpoint of step {done} is written" in err
    told = next(line for line in err.splitlines() if line.startswith("To go on: "))
    assert told.startswith("To go on: clusterkit train --preset tiny --no-progress ")
    assert "train.learning_rate=0.001" in told
    assert "trial_name=run1" in told
    page = trial.paths.logs / "report.html"
    assert not page.exists()

    again = subprocess.run([*argv, "--json"], env=ENVIRONMENT, cwd=REPOSITORY, check=False, timeout=300, **pipes)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["summary"]["parameter_sha256"] == reference.summary()["parameter_sha256"]
    assert f"picture     {page}\n" in again.stderr
    assert "finished" in page.read_text().partition("</header>")[0].partition("<header>")[2]
    assert "held-out accuracy (4 tasks, greedy)" in page.read_text()
    assert [r["resume_step"] for r in trial.records("attempt")] == [0, done]
    assert_same_run(trial, reference)
