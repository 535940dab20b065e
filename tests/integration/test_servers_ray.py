"""Engine servers as actors of a real Ray, beside two FSDP ranks: kept over attempts, one added, each ended by name."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import coin
import httpx
import psutil
import pytest
from raycluster import FOLDER, end_processes_of, own_ports
from runs import ENVIRONMENT, REPOSITORY, Trial, command, wait_for
from vllmflags import FLAGS
from vllmserver import START_SECONDS, random_qwen2, vllm_python

from tests.realparts import require
from trainer.engines.process import free_port
from trainer.judge.servers import judge_urls, judges_folder
from trainer.launch.nccl_settings import FILE_VARIABLE, KeptSettings
from trainer.serving import registry

pytestmark = pytest.mark.long

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


NODES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """A Ray of two nodes, the second with GPUs that it only believes in, and what finds it."""
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")
    folder, port = Path(tempfile.mkdtemp(prefix="ck-ray-")), free_port()  # Ray's sockets want a short path
    found = {**ENVIRONMENT, "RAY_ADDRESS": f"{NODES[0]}:{port}", "RAY_USAGE_STATS_ENABLED": "0"}
    found |= {"PYTHONPATH": f"{REPOSITORY}:{coin.FOLDER}", "VLLM_CPU_KVCACHE_SPACE": "1", FOLDER: str(folder)}
    found["CLUSTERKIT_VLLM_PYTHON"] = vllm_python()
    kept = folder / "nccl.json"  # as `clusterkit check --nccl` leaves it in a node's container
    kept.write_text(KeptSettings({"NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1"}).as_json())
    found |= {FILE_VARIABLE: str(kept), "NCCL_IB_DISABLE": "0"}
    starts = (
        ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", "--num-gpus=0"],
        [f"--address={found['RAY_ADDRESS']}", "--num-gpus=2"],
    )
    for address, options in zip(NODES, starts, strict=True):
        start = [*RAY, "start", *options, *own_ports(), f"--node-ip-address={address}", "--num-cpus=4"]
        subprocess.run(start, check=True, env=found, capture_output=True, timeout=300)
    yield found
    end_processes_of(folder)
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


def test_ranks_and_servers_get_the_nccl_settings_that_their_nodes_keep(trial: Trial) -> None:
    """But for what the user has set. After the test before, whose server still runs."""
    assert re.search(r"from clusterkit check --nccl on [\d., ]+: NCCL_SOCKET_IFNAME==lo\n", trial.log())
    environment = psutil.Process(registered(trial)[0].pid).environ()
    assert (environment["NCCL_SOCKET_IFNAME"], environment["NCCL_IB_DISABLE"]) == ("=lo", "0")


def test_a_server_is_added_to_the_run_and_used(trial: Trial, environment: dict[str, str]) -> None:
    added = servers(trial, environment, "add")
    assert (added.returncode, added.stdout) == (0, "server-1 is starting\n"), added.stderr
    wait_for(lambda: [one.state for one in registered(trial)] == ["ready", "ready"], START_SECONDS)
    assert len({httpx.URL(one.url).host for one in registered(trial)}) == len(NODES)
    first = registered(trial)[0]
    registry.write(registry.folder_of(trial.paths.logs), replace(first, base="of another model"))
    train(trial, environment, 7)
    assert "engine server server-1 joins" in trial.log()
    again = registered(trial)[0]
    assert (again.pid != first.pid, again.base) == (True, first.base), "it was to be started anew"


PLACED = """
import json, sys
from dataclasses import replace
from pathlib import Path
import ray
from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.launch.ray import RankHost
from trainer.launch.ray_servers import RayServers, namespace

config = read_config(Path(sys.argv[1]), RunConfig)
ray.init(address="auto", namespace=namespace(config.experiment_name, config.trial_name), log_to_driver=False)
ranks = [ray.remote(RankHost).options(num_gpus=1).remote() for _ in range(2)]
gpus = ray.get([rank.gpus.remote() for rank in ranks])
with RayServers(config, Path(sys.argv[2]), lambda: False, gpus):
    print(json.dumps([one.ids for one in gpus]), flush=True)
    sys.stdin.read()
"""


def test_servers_that_share_the_ranks_gpus_run_on_them(environment: dict[str, str], trial: Trial) -> None:
    shared = Trial(Path(trial.config.fileroot).with_name("shared"), Path(trial.config.cache_dir), **coin.SETTINGS)
    settings = {"mode": "ray", "trial_name": "shared", "servers.python": vllm_python(), "n_gpus_per_node": 2}
    settings |= {"allocation_mode": "vllm:d2|fsdp:d2", "servers.shutdown_on_exit": True, "train.ranks": 2}
    shared.change(**settings)
    (model,) = {one.model for one in registered(trial)}
    driver = subprocess.Popen(
        [sys.executable, "-c", PLACED, str(shared.file), model],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert driver.stdout is not None
    ids = json.loads(driver.stdout.readline())
    wait_for(lambda: len(registered(shared)) == 2)
    hosts = [psutil.Process(one.pid) for one in registered(shared)]
    assert [one.gpus for one in registered(shared)] == [(0,), (0,)]  # the only one that each sees
    assert [[host.environ()["CUDA_VISIBLE_DEVICES"]] for host in hosts] == ids == [["0"], ["1"]]
    driver.communicate("")
    assert driver.returncode == 0
    assert not any(host.is_running() for host in hosts)
    assert registered(shared) == []


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


def test_judge_servers_are_placed_once_registered_and_ended(tmp_path: Path, environment: dict[str, str]) -> None:
    random_qwen2(1).save_pretrained(tmp_path / "judge")
    folder = judges_folder(tmp_path, "me", "judged", "run1")

    def judges(action: str, **changes: str) -> subprocess.CompletedProcess[str]:
        options = {"fileroot": tmp_path, "user": "me", "experiment": "judged", "trial": "run1"}
        options |= {"model": tmp_path / "judge", "engine": "vllm", "flags": " ".join(FLAGS)} | changes
        argv = [sys.executable, "-m", "trainer.launch.ray_judges", action, *(f"--{k}={v}" for k, v in options.items())]
        return subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, env=environment)

    for _ in range(2):  # the second time it is there
        started = judges("start")
        assert (started.returncode, started.stdout) == (0, "starting: judge-0\n"), started.stderr
    wait_for(lambda: judge_urls(folder), START_SECONDS)
    (one,) = registry.read(folder)
    assert (one.state, one.starts) == ("ready", 1)
    other = judges("start", model=str(tmp_path / "another"))
    assert other.returncode == 2
    assert "serves judge for this run already" in other.stderr
    ended = judges("stop")
    assert (ended.returncode, ended.stdout) == (0, "ended: judge-0\n"), ended.stderr
    assert registry.read(folder) == []
    wait_for(lambda: not registry.process_runs(one.pid))
