"""kill -9 at any moment: the same command goes on, and the run ends with the very weights of an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import TOTAL_STEPS, Attempt, Forks, NewTrial, Trial, assert_same_run, wait_for

from clusterkit.backends.local.launch import trainer_command
from clusterkit.backends.local.train import Restarts, follow, prepared
from clusterkit.runs.trials import run_directory
from clusterkit.ui.progress import Silent
from trainer.checkpoint.slots import Slots
from trainer.paths import cache_folder

KILLS = 20
# From what can be seen from outside to the blow, at most: about as long as that part of a step takes.
MOMENTS = {"start": 0.15, "step": 0.1, "checkpoint": 0.08, "export": 0.03, "end": 0.05}


def _watch(trial: Trial, moment: str) -> Callable[[], bool]:
    """What to wait for, from now on."""
    steps, attempts = len(trial.records("step")), len(trial.records("attempt"))
    return {
        "start": lambda: len(trial.records("attempt")) > attempts,
        "step": lambda: len(trial.records("step")) > steps,
        "checkpoint": lambda: any(trial.paths.recover.glob("slot-*.tmp")),
        "export": lambda: any(trial.paths.checkpoints.glob("*.tmp")),
        "end": lambda: any(r["global_step"] == TOTAL_STEPS for r in trial.records("step")),
    }[moment]


def _kill(attempt: Attempt, condition: Callable[[], bool], delay: float) -> bool:
    """Kill at `delay` seconds after the condition came true; False when the trainer was done before."""
    if not attempt.reach(condition):
        return False
    time.sleep(delay)  # where within the step the blow falls; the end is waited for below
    attempt.send(signal.SIGKILL)
    return attempt.end() == -signal.SIGKILL


@pytest.mark.long
def test_kill_9_at_random_points(
    forks: Forks, tmp_path: Path, warm_cache: Path, reference: Trial, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(20)
    landed: Counter[str] = Counter()
    number = 0
    while landed.total() < KILLS:
        number += 1
        trial = Trial(tmp_path / f"trial{number}", warm_cache)
        done = False
        while not done and landed.total() < KILLS:
            moment = rng.choice(["start", "step", "step", "step", "checkpoint", "checkpoint", "export", "end"])
            attempt = forks.start(trial)
            if _kill(attempt, _watch(trial, moment), rng.uniform(0, MOMENTS[moment])):
                landed[moment] += 1
            else:
                done = True
        assert forks.run(trial) == 0, trial.said()
        assert_same_run(trial, reference)
        assert not [p for p in trial.records("warning") if "damaged" in p["message"]]
    record_property("kills", dict(landed))
    assert landed["step"] >= 4


@pytest.mark.parametrize(
    ("moment", "half_done", "background"),
    [("checkpoint", "slot-*.tmp", False), ("export", "epoch*.tmp", False), ("export", "epoch*.tmp", True)],
)
def test_kill_9_while_a_checkpoint_is_half_written(
    forks: Forks, tmp_path: Path, warm_cache: Path, reference: Trial, moment: str, half_done: str, background: bool
) -> None:
    """A run goes on from before the half-written one, be that an export which was to be there first."""
    # The window is some milliseconds wide: a blow that came too late is struck again, in a run of its own.
    for number in range(50):
        trial = Trial(tmp_path / f"trial{number}", warm_cache, **{"checkpoint.async_recover": background})
        folder = trial.paths.recover if moment == "checkpoint" else trial.paths.checkpoints
        _kill(forks.start(trial), _watch(trial, moment), 0.0)
        if any(folder.glob(half_done)):
            break
    else:
        pytest.fail(f"no blow of 50 fell while {half_done} was being written")
    lost = [int(path.stem.rpartition("globalstep")[2]) for path in folder.glob("epoch*.tmp")]
    slot, _ = Slots(trial.paths.recover).newest()
    assert not lost or slot is None or slot.state.global_step < min(lost)

    assert forks.run(trial) == 0, trial.said()
    assert_same_run(trial, reference)
    assert not any(folder.glob("*.tmp"))


def test_kill_9_during_the_warmup(forks: Forks, tmp_path: Path, reference: Trial) -> None:
    trial = Trial(tmp_path / "trial", tmp_path / "cold")
    for phase, delay in (("recall", 0.2), ("sft", 0.0), ("sft", 0.4)):
        seen = len(trial.records("warmup"))
        attempt = forks.start(trial)
        assert _kill(
            attempt,
            lambda phase=phase, seen=seen: any(r["phase"] == phase for r in trial.records("warmup")[seen:]),
            delay,
        )
        assert not list((cache_folder(trial.config) / "warmup").glob("*/warmup.json"))
    assert forks.run(trial) == 0, trial.said()
    assert_same_run(trial, reference)


def test_what_was_not_kept_is_done_again(forks: Forks, new_trial: NewTrial, reference: Trial) -> None:
    trial = new_trial(checkpoint={"ckpt_freq_secs": 3600.0, "ckpt_first_step": 3})

    assert _kill(forks.start(trial), lambda: len(trial.records("step")) >= 6, 0.0)
    before = trial.records("step")
    assert forks.run(trial) == 0, trial.said()

    assert [r["resume_step"] for r in trial.records("attempt")] == [0, 3]
    assert [r["global_step"] for r in trial.records("recover")] == [3, TOTAL_STEPS]
    assert "Will recover from: StepInfo(epoch=1, epoch_step=3, global_step=3)" in trial.log()
    again = trial.records("step")[len(before) :]
    assert [s["task_ids"] for s in again[: len(before) - 3]] == [s["task_ids"] for s in before[3:]]
    assert_same_run(trial, reference)


def test_the_train_command_starts_a_killed_trainer_again(new_trial: NewTrial, reference: Trial) -> None:
    trial = new_trial(recover_after=0.0)
    run = run_directory(trial.config, trial.config.trial_name)

    def kill() -> None:
        wait_for(lambda: len(trial.records("step")) >= 3)
        os.kill(int((run.logs / "run.lock").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with prepared(run, trial.config) as attempt:
        outcome = follow(run, trainer_command(run), attempt, Silent(), "again", Restarts.of(trial.config))
    killer.join()

    assert (outcome.status, outcome.exit_code) == ("completed", 0), outcome.message
    assert_same_run(trial, reference)
    assert [record["attempt"] for record in trial.records("attempt")] == [1, 2]
    assert trial.records("attempt")[1]["resume_step"] >= 2
    assert any("ended by SIGKILL): restart 1 in 0 s" in record["message"] for record in trial.records("warning"))
