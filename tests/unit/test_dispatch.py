"""What a run on a cluster is told, and what a Ray job does with it on the head node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from clusterkit.dispatch.submit import Order, on_cluster
from clusterkit.hosts.model import Cluster, Host
from clusterkit.resolve import resolve
from trainer.config import RunConfig
from trainer.errors import UserError

CLUSTER = Cluster(hosts=(Host(name="h1"),), storage="/storage")


def job(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.job", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def write_config(folder: Path, **values: object) -> Path:
    path = folder / "logs" / "config.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump({"fileroot": str(folder / "runs"), "cache_dir": str(folder / "cache"), **values}))
    return path


def test_paths_of_a_cluster_replace_those_of_this_machine() -> None:
    config = on_cluster(RunConfig(fileroot="/home/me/runs"), CLUSTER)
    assert (config.fileroot, config.cache_dir) == ("/storage/ray/experiments", "/storage/ray/cache")


def test_a_place_of_the_users_must_be_shared() -> None:
    assert on_cluster(RunConfig(fileroot="/storage/mine"), CLUSTER, own_fileroot=True).fileroot == "/storage/mine"
    with pytest.raises(UserError, match="not below /storage"):
        on_cluster(RunConfig(fileroot="/home/me/runs"), CLUSTER, own_fileroot=True)


def test_fingerprint_is_that_of_the_command_not_of_the_trial_it_led_to() -> None:
    first, second = RunConfig(trial_name="run1"), RunConfig(trial_name="run2")
    assert Order(CLUSTER, first).fingerprint == Order(CLUSTER, second).fingerprint
    assert Order(CLUSTER, first, named=True).fingerprint != Order(CLUSTER, second, named=True).fingerprint
    assert Order(CLUSTER, first).fingerprint != Order(CLUSTER, RunConfig(seed=2)).fingerprint


def test_job_keeps_the_trainers_words_and_exit_code(tmp_path: Path) -> None:
    config = write_config(tmp_path, no_such_key=1)
    for attempt in (1, 2):
        running = job(config)
        said, _ = running.communicate(timeout=60)
        assert running.returncode == 2
        assert "no_such_key" in said
        assert (config.parent / f"attempt_{attempt}" / "console.log").read_text() == said


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A job whose trainer is at work, and its metrics."""
    values = resolve("tiny", None, ["warmup.recall_steps=100000"]).config.model_dump(exclude={"fileroot", "cache_dir"})
    running = job(write_config(tmp_path, **values))
    deadline = time.monotonic() + 60
    while not (found := [path for path in (tmp_path / "runs").rglob("metrics.jsonl") if path.stat().st_size]):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return running, found[0]


def test_job_that_is_stopped_lets_the_trainer_stop_in_its_own_way(tmp_path: Path) -> None:
    running, _ = begun(tmp_path)
    os.kill(running.pid, signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "interrupted by SIGTERM" in said
    mark = json.loads((tmp_path / "logs" / "attempt_1" / "exit.json").read_text())
    assert mark["code"] == 130


def test_trainer_stops_when_the_job_is_killed(tmp_path: Path) -> None:
    running, metrics = begun(tmp_path)
    running.kill()
    deadline = time.monotonic() + 60
    while '"kind": "finish"' not in metrics.read_text():
        assert time.monotonic() < deadline, metrics.read_text()
        time.sleep(0.05)
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert (last["status"], "SIGTERM" in last["message"]) == ("interrupted", True)
