"""`train --sweep` with real trainers: stopped and gone on with, and with a trial that fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import ENVIRONMENT, REPOSITORY, wait_for

from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.log.metrics import read_history

FAST = [
    *("model.tiny.hidden_size=32", "model.tiny.num_layers=2", "model.tiny.intermediate_size=64"),
    *("warmup.recall_steps=2", "warmup.steps=2", "warmup.batch_size=4", "warmup.gate=0", "warmup.retries=0"),
    *("rollout.batch_size=4", "rollout.group_size=4", "eval.num_tasks=2", "eval.final_chunks=[]", "train.threads=1"),
    *("monitor.tensorboard=false", "checkpoint.ckpt_freq_secs=0", "checkpoint.ckpt_first_step=1"),
]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a sweep as a user does."""

    def started(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "tiny", *FAST, *words]
        environment = {**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "CLUSTERKIT_CACHE": str(tmp_path / "cache")}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, cwd=tmp_path, env=environment, start_new_session=True, **pipes)

    return started


def run_of(folder: Path, trial: str) -> RunDirectory:
    return RunDirectory(folder / "runs", user_name(), "tiny-recall", trial)


@pytest.mark.long
def test_a_sweep_is_stopped_by_ctrl_c_and_the_same_command_goes_on(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    command = ("--sweep", "train.learning_rate=1e-4,2e-4", "train.total_steps=25", "--json")
    first, second = (run_of(tmp_path, f"learning_rate-0.000{number}") for number in (1, 2))

    process = start(*command)
    wait_for(lambda: read_history(second.metrics).global_step >= 2 or process.poll() is not None, every=0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)

    assert process.returncode == 130, err
    told = json.loads(out)
    assert [trial["state"] for trial in told["trials"]] == ["finished", "interrupted"]
    assert told["exit_code"] == 130
    assert "[2 of 2] tiny-recall/learning_rate-0.0002 starts from the beginning" in err
    assert "--sweep train.learning_rate=1e-4,2e-4" in err.partition("To go on: clusterkit train")[2]
    stopped = read_history(second.metrics).global_step
    assert stopped < 25
    before = first.metrics.read_bytes()

    out, err = start(*command).communicate(timeout=300)

    told = json.loads(out)
    assert "tiny-recall/learning_rate-0.0001 is complete already" in err
    assert f"tiny-recall/learning_rate-0.0002 goes on after step {stopped}" in err
    assert first.metrics.read_bytes() == before, "a complete trial is left alone"
    assert second.attempt_numbers() == [1, 2]
    assert [(trial["state"], trial["global_step"]) for trial in told["trials"]] == [("finished", 25)] * 2
    assert [trial["settings"] for trial in told["trials"]] == [{"train.learning_rate": rate} for rate in (1e-4, 2e-4)]
    assert all(trial["accuracy"] is not None for trial in told["trials"])
    assert told["exit_code"] == 0
    assert "clusterkit runs --experiment tiny-recall --sort accuracy" in err


def test_a_trial_that_fails_does_not_keep_the_others_from_being_trained(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """A memory that does not fit into the window with the words of the prompt is refused by the trainer alone."""
    process = start("--sweep", "agent.max_memory_tokens=502,4", "train.total_steps=1", "--no-progress")
    out, err = process.communicate(timeout=300)

    assert process.returncode == 3, err
    assert "error: tiny-recall/max_memory_tokens-502: " in err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["run", "state", "step"]
    assert lines[1].split()[:2] == ["tiny-recall/max_memory_tokens-502", "failed"]
    assert lines[2].split()[:3] == ["tiny-recall/max_memory_tokens-4", "finished", "1/1"]
    assert read_history(run_of(tmp_path, "max_memory_tokens-4").metrics).global_step == 1
