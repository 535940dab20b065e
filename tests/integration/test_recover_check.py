"""`clusterkit recover check`: what would be resumed, and whether the trainer would have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter
from runs import Forks, NewTrial
from slot_writer import write_slot

from clusterkit.config.resolve import resolve

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


def check(root: Path, *words: str, code: int) -> dict[str, Any]:
    command = [CLUSTERKIT, "recover", "check", "--fileroot", str(root), "--json", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"error": done.stderr}
    return found


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    """A run of the tiny preset with two whole checkpoints, the newer one of step 8."""
    writer = RunWriter(tmp_path).config(f"fileroot={tmp_path}").attempt().steps(1, 9)
    config = resolve("tiny").config
    write_slot(writer.run.recover, "slot-a", 1, 4, config)
    write_slot(writer.run.recover, "slot-b", 2, 8, config)
    return writer


def test_what_would_be_resumed(tmp_path: Path, writer: RunWriter) -> None:
    for words in ((), ("--preset", "tiny"), ("--preset", "tiny", "train.total_steps=99")):
        found = check(tmp_path, *words, code=0)
        assert (found["fits"], found["resume"]["slot"], found["resume"]["global_step"]) == (True, "slot-b", 8)
        assert [slot["whole"] for slot in found["slots"]] == [True, True]
        assert found["differences"] == []
    assert found["slots"][0]["bytes"] > 10_000
    assert 0 <= found["resume"]["age_s"] < 600
    text = subprocess.run(
        [CLUSTERKIT, "recover", "check", "--fileroot", str(tmp_path)], check=False, capture_output=True, text=True
    )
    assert "goes on after step 8, from slot-b" in text.stdout


def test_a_preset_means_the_trial_that_train_would_go_on_with(tmp_path: Path, writer: RunWriter) -> None:
    other = RunWriter(tmp_path, trial="mine").config(f"fileroot={tmp_path}").attempt().steps(1, 9)
    os.utime(other.run.config, (time.time() + 60, time.time() + 60))

    assert check(tmp_path, code=1)["trial"] == "mine", "the newest"
    assert check(tmp_path, "--preset", "tiny", code=0)["trial"] == writer.run.trial
    assert check(tmp_path, "--preset", "tiny", "trial_name=mine", code=1)["trial"] == "mine"


def test_settings_that_differ_are_shown_with_the_way_on(tmp_path: Path, writer: RunWriter) -> None:
    found = check(tmp_path, "--preset", "tiny", "seed=7", "train.learning_rate=0.5", code=1)
    assert {"key": "seed", "was": 1, "now": 7} in found["differences"]
    assert [change["key"] for change in found["differences"]] == ["seed", "train.learning_rate"]
    assert "--recover-from tiny-recall/run1 trial_name=NEW" in found["advice"]
    assert check(tmp_path, "seed=7", code=1)["differences"] == [{"key": "seed", "was": 1, "now": 7}]


def test_damage_is_found_and_the_other_slot_would_serve(tmp_path: Path, writer: RunWriter) -> None:
    shard = writer.run.recover / "slot-b" / "__0_0.distcp"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    found = check(tmp_path, code=0)
    assert (found["resume"]["slot"], found["resume"]["global_step"]) == ("slot-a", 4)
    (bad,) = [slot for slot in found["slots"] if not slot["whole"]]
    assert (bad["name"], bad["problem"]) == ("slot-b", "is damaged: __0_0.distcp has other bytes than were written")

    (writer.run.recover / "slot-a" / "MANIFEST.json").write_text("{")
    assert check(tmp_path, code=1)["verdict"] == "no recover checkpoint is whole: a start is refused"


def test_nothing_there(tmp_path: Path) -> None:
    assert "no runs found under" in check(tmp_path, code=1)["error"]
    writer = RunWriter(tmp_path).config().attempt().steps(1, 1)
    assert "there is no recover checkpoint" in check(tmp_path, code=1)["verdict"]
    writer.record("recover", global_step=1)
    found = check(tmp_path, code=1)
    assert found["verdict"] == "its recover checkpoints have gone: a start is refused"
    assert f"put {writer.run.recover} back" in found["advice"]
    dry_run = [CLUSTERKIT, "train", "--preset", "tiny", "--here", "--dry-run", "--fileroot", str(tmp_path)]
    planned = subprocess.run(dry_run, check=True, capture_output=True, text=True)
    assert "is refused: its recover checkpoints have gone" in planned.stdout
    assert "no run */nope" in check(tmp_path, "--trial", "nope", code=1)["error"]
    assert "unknown preset" in check(tmp_path, "--preset", "tyni", code=2)["error"]


def test_a_clock_that_was_put_back_gives_no_negative_age(tmp_path: Path, writer: RunWriter) -> None:
    later = time.time() + 7200
    for path in writer.run.recover.rglob("*"):
        os.utime(path, (later, later))
    assert check(tmp_path, code=0)["resume"]["age_s"] == 0


def test_it_says_what_the_trainer_then_does(new_trial: NewTrial, forks: Forks) -> None:
    trial = new_trial()
    trial.change(**{"train.total_steps": 3})
    assert forks.run(trial) == 0
    (trial.paths.logs / "config.yaml").write_text(trial.file.read_text())  # as `clusterkit train` does
    where = ("--experiment", trial.config.experiment_name)
    root = Path(trial.config.fileroot)
    assert check(root, *where, code=0)["resume"]["global_step"] == 3
    trial.change(**{"train.total_steps": 4})
    assert check(root, *where, "train.total_steps=4", code=0)["fits"]
    assert forks.run(trial) == 0
    assert trial.records("attempt")[-1]["resume_step"] == 3
    trial.change(seed=5)
    assert check(root, *where, "seed=5", code=1)["differences"] == [{"key": "seed", "was": 1, "now": 5}]
    assert forks.run(trial) == 2
