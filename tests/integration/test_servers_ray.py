"""Engine servers as actors of a real Ray, beside two FSDP ranks: kept over attempts, one added, each ended by name."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import coin
import pytest
from runs import ENVIRONMENT, REPOSITORY, Trial, command, wait_for
from vllmserver import vllm_python

from tests.realparts import require
from trainer.engines.process import free_port
from trainer.serving import registry

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """A Ray of one node, and what finds it."""
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")
    folder, port = Path(tempfile.mkdtemp(prefix="ck-ray-")), free_port()  # Ray's sockets want a short path
    found = {**ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_USAGE_STATS_ENABLED": "0"}
    found |= {"PYTHONPATH": f"{REPOSITORY}:{coin.FOLDER}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    start = ["start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=6", f"--temp-dir={folder}"]
    subprocess.run([*RAY, *start, "--include-dashboard=false"], check=True, env=found, capture_output=True, timeout=120)
    yield found
    subprocess.run([*RAY, "stop", "--force"], check=False, env=found, capture_output=True, timeout=120)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Trial:
    folder = tmp_path_factory.mktemp("ray-servers")
    made = Trial(folder / "runs", folder / "cache", **coin.SETTINGS)
    made.change(**{"mode": "ray", "servers.python": vllm_python(), "train.ranks": 2})
    return made


def registered(trial: Trial) -> list[registry.Registration]:
    return registry.read(registry.folder_of(trial.paths.logs))


def train(trial: Trial, environment: dict[str, str], steps: int) -> None:
    trial.change(**{"train.total_steps": steps})
    running = command(trial, env=environment)
    said = running.communicate(timeout=600)
    assert running.returncode == 0, said


def servers(trial: Trial, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """What `clusterkit serve` has a job on the cluster do."""
    argv = [sys.executable, "-m", "trainer.launch.ray_servers", words[0], str(trial.file), *words[1:]]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)


def test_ranks_and_server_are_placed_and_the_server_outlives_them(trial: Trial, environment: dict[str, str]) -> None:
    train(trial, environment, 3)
    first = registered(trial)
    assert [(one.name, one.state, one.kept) for one in first] == [("server-0", "ready", True)]
    train(trial, environment, 5)
    assert registered(trial) == first, "it was started again"
    numbers = [step["stats"] for step in trial.records("step")]
    assert [n["staleness_max"] for n in numbers] == [0, 1, 1, 0, 1]
    assert numbers[0]["mismatch_kl"] < 1e-6
    assert numbers[3]["mismatch_kl"] < 1e-6  # after recovery the server was given the weights of the checkpoint


def test_a_server_is_added_to_the_run_and_used(trial: Trial, environment: dict[str, str]) -> None:
    added = servers(trial, environment, "add")
    assert (added.returncode, added.stdout) == (0, "server-1 is starting\n"), added.stderr
    wait_for(lambda: [one.state for one in registered(trial)] == ["ready", "ready"])
    train(trial, environment, 7)
    assert "engine server server-1 joins" in trial.log()


def test_servers_end_by_name(trial: Trial, environment: dict[str, str]) -> None:
    pids = [one.pid for one in registered(trial)]
    for name in ("server-0", "server-1"):
        ended = servers(trial, environment, "stop", name)
        assert (ended.returncode, ended.stdout) == (0, f"{name} has ended\n"), ended.stderr
    assert registered(trial) == []
    wait_for(lambda: not any(registry.process_runs(pid) for pid in pids))
    unknown = servers(trial, environment, "stop", "server-9")
    assert unknown.returncode == 2
    assert "the run has no server server-9" in unknown.stderr
