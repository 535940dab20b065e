"""`train --recover-from`: a new run from another run's recover checkpoint or weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_writer import RunWriter
from runs import Forks, NewTrial
from slot_writer import write_slot

from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import hold_lock

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))
PLAN = ("train", "--preset", "tiny", "--dry-run", "--json")


def run(folder: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([CLUSTERKIT, *words], check=False, capture_output=True, text=True, cwd=folder)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    """A stopped run of the tiny preset whose checkpoint is that of step 8."""
    writer = RunWriter(tmp_path / "runs").config().attempt().steps(1, 8).finish("interrupted", 8)
    write_slot(writer.run.recover, "slot-a", 1, 8, resolve("tiny").config)
    return writer


def test_it_is_a_new_trial_whose_other_settings_may_change(tmp_path: Path, writer: RunWriter) -> None:
    words = (*PLAN, "--recover-from", "tiny-recall/run1", "train.total_steps=40", "train.learning_rate=0.5")
    planned = json.loads(run(tmp_path, *words).stdout)
    assert planned["config"]["recover_from"] == str(writer.run.recover)
    assert (planned["plan"]["run"], planned["plan"]["course"]) == ("tiny-recall/run2", "new")
    by_path = json.loads(run(tmp_path, *words[:6], str(writer.run.recover), *words[7:]).stdout)
    assert by_path["config"] == planned["config"]

    # The same command goes on with what it has begun.
    second = RunWriter(tmp_path / "runs", trial="run2").attempt().steps(9, 9)
    second.run.config.write_text(yaml.safe_dump(planned["config"]))
    again = json.loads(run(tmp_path, *words).stdout)["plan"]
    assert (again["run"], again["course"]) == ("tiny-recall/run2", "resume")


def test_a_model_that_does_not_fit_is_refused_with_the_differences(tmp_path: Path, writer: RunWriter) -> None:
    words = (*PLAN, "--recover-from", "tiny-recall/run1", "train.total_steps=40")
    said = run(tmp_path, *words, "model.tiny.hidden_size=64", "task.num_keys=99", "seed=4", code=2).stderr
    assert "model.tiny.hidden_size: 256 → 64" in said
    assert "task.num_keys: " in said
    assert "seed" not in said
    assert "train.total_steps=16" in run(tmp_path, *words[:-1], "train.total_steps=8", code=2).stderr


def test_sources_that_are_none(tmp_path: Path, writer: RunWriter) -> None:
    def refused(source: str, code: int = 2) -> str:
        return run(tmp_path, *PLAN, "--recover-from", source, code=code).stderr

    assert "no run tiny-recall/nope" in refused("tiny-recall/nope", 1)
    assert "EXPERIMENT/TRIAL" in refused("run1")
    assert "there is no such folder" in refused("/no/such/folder")
    assert "no recover checkpoint" in refused(str(tmp_path))
    with hold_lock(writer.run.logs / "run.lock"):
        assert "is being trained now by process" in refused("tiny-recall/run1")
    (writer.run.recover / "slot-a" / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in refused("tiny-recall/run1", 1)


def test_weights_start_a_run_from_step_one(tmp_path: Path, mini_hotpotqa: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30}
    for name in ("base", "better"):
        (tmp_path / name).mkdir()
        for file in ("model.safetensors", "tokenizer.json"):
            (tmp_path / name / file).write_text("{}")
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    weights = tmp_path / "better"
    data = (f"task.path={mini_hotpotqa}", "task.num_documents=2")
    words = ("train", "--preset", "135M_cpu", *data, f"model.path={tmp_path / 'base'}", "--dry-run", "--json")
    planned = json.loads(run(tmp_path, *words, "--recover-from", str(weights)).stdout)["config"]
    assert planned["recover_from"] == planned["model"]["path"] == str(weights)

    (weights / "config.json").write_text(json.dumps({**shape, "hidden_size": 512}))
    said = run(tmp_path, *words, "--recover-from", str(weights), code=2).stderr
    assert "hidden_size: 512 → 576" in said
    assert "builds its model from nothing" in run(tmp_path, *PLAN, "--recover-from", str(weights), code=2).stderr


def test_the_trainer_goes_on_from_it_under_another_name(new_trial: NewTrial, forks: Forks) -> None:
    source = new_trial("source")
    source.change(**{"train.total_steps": 3})
    assert forks.run(source) == 0
    before = source.recover_files()

    child = new_trial("child", trial_name="child", recover_from=str(source.paths.recover))
    child.change(**{"train.total_steps": 6, "train.learning_rate": 5e-4})
    assert forks.run(child) == 0, child.said()
    assert child.records("attempt")[0]["resume_step"] == 3
    assert [step["global_step"] for step in child.records("step")] == [4, 5, 6]
    assert child.summary()["status"] == "completed"
    assert source.recover_files() == before, "the other run is left as it is"
    assert child.records("recover")[0]["global_step"] == 4

    # Its own checkpoint is what it goes on from; the other run is no longer needed.
    shutil.rmtree(source.paths.recover)
    child.change(**{"train.total_steps": 7})
    assert forks.run(child) == 0, child.said()
    assert child.records("attempt")[-1]["resume_step"] == 6

    other = new_trial("other", trial_name="other", recover_from=str(source.paths.recover))
    assert forks.run(other) == 2
    assert "there is no whole recover checkpoint" in other.said()


def test_the_trainer_refuses_what_does_not_fit(new_trial: NewTrial, forks: Forks) -> None:
    source = new_trial("source")
    source.change(**{"train.total_steps": 2})
    assert forks.run(source) == 0
    child = new_trial("child", trial_name="child", recover_from=str(source.paths.recover))
    child.change(**{"rollout.batch_size": 2})
    assert forks.run(child) == 2
    assert "rollout.batch_size: 4 -> 2" in child.said()
