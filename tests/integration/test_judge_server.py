"""A real reader and judge: SmolLM2-135M-Instruct on a vLLM server on the CPU, started as a user starts it.

The agent that is trained is the tiny one; what it wrote is read and judged by the server. Killed in the middle, the
server comes back and the run goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import ENVIRONMENT, REPOSITORY, Trial, command
from vllmflags import FLAGS
from vllmserver import vllm_python

from trainer.judge.servers import judge_urls, judges_folder
from trainer.paths import user_name

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

START_S = 900.0
FAST = " ".join((*FLAGS, "--max-model-len", "2048", "--max-num-seqs", "16"))
SETTINGS = {
    "experiment_name": "judged",
    "task": {"name": "facts", "train_size": 8, "min_chunks": 2, "max_chunks": 2, "num_questions": 2, "num_keys": 16},
    "agent": {"name": "memalpha", "template": "words", "chunk_tokens": 10, "max_memory_tokens": 14}
    | {"context_tokens": 64, "shown_items": 2, "max_final_tokens": 5},
    "reward": {"name": "memalpha"},
    "judge": {"reader": "server", "answer_tokens": 12, "verdict_tokens": 40, "timeout_s": 300.0, "wait_s": 1200.0},
    "rollout": {"batch_size": 2, "group_size": 2},
    "train": {"total_steps": 3},
    "warmup": {"recall_steps": 60, "steps": 40, "learning_rate": 2e-3},
    "eval": {"every_steps": 0, "num_tasks": 2},
}


def until(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = START_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.1)


@pytest.fixture
def fileroot(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def judge(fileroot: Path, smollm2_path: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`clusterkit serve judge`, ready; ended with SIGINT as by Ctrl-C."""
    argv = [sys.executable, "-m", "clusterkit.cli.main", "serve", "judge", "--model", str(smollm2_path)]
    argv += ["--engine", "vllm", "--experiment", "judged", "--trial", "run1", "--fileroot", str(fileroot)]
    argv += ["--flags", FAST]
    env = {**ENVIRONMENT, "CLUSTERKIT_VLLM_PYTHON": vllm_python(), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "judge.log").open("w") as log:
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdout=log, stderr=log, text=True, env=env, start_new_session=True
        )
        try:
            until(lambda: urls(fileroot), process)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(timeout=300)


def urls(fileroot: Path) -> list[str]:
    return judge_urls(judges_folder(fileroot, user_name(), "judged", "run1"))


def kill_server(judge: subprocess.Popen[str]) -> None:
    """End the server that answers, as the kernel does; its host lives on."""
    (host,) = psutil.Process(judge.pid).children()
    for process in host.children(recursive=True):
        process.kill()


def test_a_run_trains_with_a_real_judge_that_is_killed_in_the_middle(
    judge: subprocess.Popen[str], fileroot: Path, tmp_path: Path
) -> None:
    trial = Trial(fileroot, tmp_path / "cache", **SETTINGS)
    trainer = command(trial)
    until(lambda: trial.records("step"), trainer)
    kill_server(judge)
    out, err = trainer.communicate(timeout=START_S)

    assert (trainer.returncode, out) == (0, ""), err
    steps = trial.records("step")
    assert [step["global_step"] for step in steps] == [1, 2, 3]
    assert all(step["stats"]["failed_trajectories"] == 0 for step in steps)
    assert all(step["stats"]["n_seqs"] == 4 for step in steps)
    assert sum(step["stats"]["judge_requests"] for step in steps) > 0
    assert sum(step["stats"]["unscored_questions"] for step in steps) == 0
    assert "the run waits" in trial.log()
    assert "the judge answers again" in trial.log()
    assert trial.summary()["status"] == "completed"

    judge.terminate()  # the command alone: it hands the signal on
    assert judge.wait(timeout=300) == 0
    assert urls(fileroot) == []  # the registration is gone with the servers
    said = (tmp_path / "judge.log").read_text()
    assert "judge server judge-0 is no longer used: it was told to end" in said
    assert "engine server" not in said
