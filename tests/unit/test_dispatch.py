"""What a run on a cluster is told, and what a Ray job does with it on the head node."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from clusterkit.backends.base import RunRequest
from clusterkit.backends.ray.jobs import RayJob, matching_jobs, of_others
from clusterkit.backends.ray.request import on_cluster
from clusterkit.config.resolve import resolve
from clusterkit.hosts.model import Cluster, Host
from trainer.config import RunConfig
from trainer.errors import UserError

CLUSTER = Cluster(hosts=(Host(name="h1"),), storage="/storage")


def job(config: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.job", str(config), *more],
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
    assert RunRequest(first).fingerprint == RunRequest(second).fingerprint
    assert RunRequest(first, named=True).fingerprint != RunRequest(second, named=True).fingerprint
    assert RunRequest(first).fingerprint != RunRequest(RunConfig(seed=2)).fingerprint


def test_job_keeps_the_trainers_words_and_exit_code(tmp_path: Path) -> None:
    config = write_config(tmp_path, no_such_key=1)
    for attempt in (1, 2):
        running = job(config)
        said, _ = running.communicate(timeout=300)
        assert running.returncode == 2
        assert "no_such_key" in said
        assert (config.parent / f"attempt_{attempt}" / "console.log").read_text() == said


def test_job_runs_with_what_it_was_submitted_with_whatever_config_yaml_says(tmp_path: Path) -> None:
    config = write_config(tmp_path, seed=1)
    submitted = tmp_path / "logs" / "submitted" / "one.yaml"
    submitted.parent.mkdir()
    submitted.write_text(yaml.safe_dump({"fileroot": str(tmp_path / "runs"), "no_such_key": 2}))
    digest = hashlib.sha256(submitted.read_bytes()).hexdigest()
    running = job(config, str(submitted), digest)
    said, _ = running.communicate(timeout=300)
    assert (running.returncode, "no_such_key" in said) == (2, True), said
    assert config.read_bytes() == submitted.read_bytes()


@pytest.mark.parametrize("change", ["changed", "gone"])
def test_job_refuses_what_it_was_not_submitted_with(tmp_path: Path, change: str) -> None:
    config = write_config(tmp_path, seed=1)
    before = config.read_bytes()
    submitted = tmp_path / "one.yaml"
    if change == "changed":
        submitted.write_text("seed: 2\n")
    running = job(config, str(submitted), hashlib.sha256(b"seed: 3\n").hexdigest())
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 2
    assert "is not what this job was submitted with" in said
    assert "Traceback" not in said
    assert config.read_bytes() == before
    assert not list(config.parent.glob("attempt_*"))


def test_only_runs_of_the_user_are_chosen() -> None:
    def one(user: str, trial: str, status: str = "RUNNING", kind: str = "clusterkit-train") -> RayJob:
        data = {"kind": kind, "user": user, "experiment": "e", "trial": trial, "run_dir": f"/{user}/logs/e/{trial}"}
        return RayJob(f"{user}-{trial}", status, metadata={key: value for key, value in data.items() if value})

    known = [one("alice", "run1"), one("bob", "run1"), one("bob", "run2", "STOPPED"), one("", "x", kind="")]
    assert [job.user for job in matching_jobs(known, "bob", None, None)] == ["bob"]
    assert [job.user for job in matching_jobs(known, "alice", "e", "run1")] == ["alice"]
    assert matching_jobs(known, "carol", None, None) == []
    assert [job.submission_id for job in matching_jobs(known, "bob", None, None, "/bob")] == ["bob-run1"]
    assert matching_jobs(known, "bob", None, None, "/alice") == [], "of another folder of runs"
    assert [job.user for job in of_others(known, "bob")] == ["alice", ""]


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    """A job whose trainer is at work, and its metrics."""
    values = resolve("tiny", None, ["warmup.recall_steps=100000"]).config.model_dump(exclude={"fileroot", "cache_dir"})
    running = job(write_config(tmp_path, **values))
    deadline = time.monotonic() + 300
    while not (found := [path for path in (tmp_path / "runs").rglob("metrics.jsonl") if path.stat().st_size]):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return running, found[0]


def test_job_that_is_stopped_lets_the_trainer_stop_in_its_own_way(tmp_path: Path) -> None:
    running, _ = begun(tmp_path)
    os.kill(running.pid, signal.SIGTERM)
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 130, said
    assert "interrupted during the warm-up" in said
    mark = json.loads((tmp_path / "logs" / "attempt_1" / "exit.json").read_text())
    assert mark["code"] == 130


def test_trainer_stops_when_the_job_is_killed(tmp_path: Path) -> None:
    running, metrics = begun(tmp_path)
    running.kill()
    deadline = time.monotonic() + 300
    while '"kind": "finish"' not in metrics.read_text():
        assert time.monotonic() < deadline, metrics.read_text()
        time.sleep(0.05)
    last = json.loads(metrics.read_text().splitlines()[-1])
    assert last["status"] == "interrupted"
