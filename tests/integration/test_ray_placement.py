"""Ranks on a real Ray of three nodes, with GPUs that it only believes in: where they go, and replicas that train."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from raycluster import FOLDER, RAY, end_processes_of, own_ports
from runs import ENVIRONMENT, REPOSITORY, NewTrial, Trial, command, wait_for
from safetensors.torch import load

from tests.realparts import require
from trainer.engines.process import free_port

NODES = {"127.0.0.1": 4, "127.0.0.2": 2, "127.0.0.3": 3}
"""GPUs of each node, the head first."""


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")
    folder, port = Path(tempfile.mkdtemp(prefix="ck-ray-")), free_port()  # Ray's sockets want a short path
    found = {**ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_USAGE_STATS_ENABLED": "0", FOLDER: str(folder)}
    found["PYTHONPATH"] = str(REPOSITORY)
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
    try:
        for address, gpus in NODES.items():
            where = head if address == "127.0.0.1" else [f"--address={found['RAY_ADDRESS']}"]
            start = [*RAY, "start", *where, *own_ports(), f"--node-ip-address={address}", "--num-cpus=4"]
            start.append(f"--num-gpus={gpus}")
            subprocess.run(start, check=True, env=found, capture_output=True, timeout=300)
        yield found
    finally:
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


PLACED = """
import json, sys
from pathlib import Path
import ray
from trainer.config import RunConfig
from trainer.launch.ray import RayRun
from trainer.checkpoint.start import Start
from trainer.signals import StopFlag

ray.init(address="auto", log_to_driver=False)
names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
config = RunConfig.model_validate_json(sys.argv[1])
run = RayRun.__new__(RayRun)
run.config, run.stop = config, StopFlag()
places = ray.get([actor.gpus.remote() for actor in run._reserved_actors()])
print(json.dumps([[names[place.node], *place.ids] for place in places]))
"""


def placed(environment: dict[str, str], ranks: int, allocation: str) -> list[list[str]]:
    """Address and GPU of every rank."""
    settings = {"allocation_mode": allocation, "n_nodes": 1, "n_gpus_per_node": ranks * 2, "train": {"ranks": ranks}}
    words = [sys.executable, "-c", PLACED, json.dumps(settings)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[str]] = json.loads(done.stdout)
    return found


ENDED = """
import sys, time
from pathlib import Path
import ray
from trainer.launch import ray_servers

class Host:
    def ready(self):
        return True

    def stop(self, mine, other):
        Path(mine).touch()
        while not Path(other).exists():
            time.sleep(0.05)
        Path(mine).with_suffix(".ended").touch()

class Handle:
    def __init__(self, *files):
        self.stop, self.actor, self.files = self, ray.remote(Host).remote(), files
    def remote(self):
        return self.actor.stop.remote(*self.files)

ray.init(address="auto", log_to_driver=False)
one, two = sys.argv[1:]
handles = [Handle(one, two), Handle(two, one)]
ray.get([handle.actor.ready.remote() for handle in handles])  # what is measured is their end, not their start
ray_servers.ACTOR_END_SECONDS = 60.0
ray_servers.end_actors(handles)
"""


def test_servers_end_at_the_same_time_however_many_there_are(environment: dict[str, str], tmp_path: Path) -> None:
    """Each of two ends when the other has been told to; one after the other they would both be killed."""
    words = [sys.executable, "-c", ENDED, str(tmp_path / "one"), str(tmp_path / "two")]
    subprocess.run(words, env=environment, timeout=300, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "one.ended", "two.ended"}


def test_tensor_parallel_ranks_share_a_host_and_the_head_is_spared(environment: dict[str, str]) -> None:
    assert placed(environment, 4, "sglang:d4+fsdp:d2t2") == [
        ["127.0.0.3", "0"], ["127.0.0.3", "1"], ["127.0.0.2", "0"], ["127.0.0.2", "1"],
    ]  # fmt: skip


@pytest.mark.long
def test_the_head_is_taken_where_the_others_have_no_room(environment: dict[str, str]) -> None:
    addresses = [address for address, _ in placed(environment, 6, "sglang:d6+fsdp:d6")]

    assert addresses[:5] == ["127.0.0.3"] * 3 + ["127.0.0.2"] * 2
    assert addresses[5] not in addresses[:5]  # Ray has its own name for the head


@pytest.mark.long
def test_replicas_lose_a_rank_and_go_on_in_another_layout(
    environment: dict[str, str], new_trial: NewTrial, reference: Trial
) -> None:
    """Two replicas of two ranks each; then two that are whole, whose ranks share layers; as one rank's run."""
    settings = {"mode": "ray", "n_gpus_per_node": 4, "allocation_mode": "fsdp:d4s2", "recover_retries": 0}
    trial = new_trial(**settings)
    attempt = command(trial, env=environment)
    wait_for(lambda: len(trial.records("step")) >= 4 or attempt.poll() is not None)
    (last,) = [process for process in psutil.process_iter() if _is_rank(process, "3", environment[FOLDER])]
    last.kill()
    _, said = attempt.communicate()
    assert attempt.returncode == 1
    assert "rank 3 of 4 was ended by signal 9, SIGKILL" in said

    trial.change(allocation_mode="fsdp:d2s1t2")
    attempt = command(trial, env=environment)
    _, said = attempt.communicate()
    assert attempt.returncode == 0, said
    first, second = trial.records("attempt")
    assert first["ranks"] == second["ranks"] == 4
    assert second["resume_step"] >= 3
    assert trial.weights().keys() == reference.weights().keys()
    for name, expected in reference.weights().items():
        ours, theirs = load(trial.weights()[name]), load(expected)
        assert max(float((ours[n] - theirs[n]).abs().max()) for n in theirs) <= 1e-5


def _is_rank(process: psutil.Process, number: str, folder: str) -> bool:
    with suppress(psutil.Error):
        return process.cmdline()[-2:] == ["trainer.launch.rank", number] and process.environ().get(FOLDER) == folder
    return False
