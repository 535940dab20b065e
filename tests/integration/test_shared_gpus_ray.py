"""A run whose servers share the ranks' GPUs, on a Ray of four nodes with GPUs that it only believes in.

Nodes are addresses of this machine's loopback; SGLang is the stand-in of tests/standins. Placement, hosts, ranks, hand
over of weights, the loss of nodes and the restart are real.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import coin
import psutil
import pytest
from raycluster import FOLDER, RAY, end_processes_of, own_ports
from runs import DEADLINE_S, ENVIRONMENT, REPOSITORY, Trial
from sharedgpus import STANDINS, assert_went_on, go_through_a_loss, settings

from tests.realparts import require
from trainer.engines.process import free_port

pytestmark = pytest.mark.long

HEAD = "127.0.0.1"
WORKERS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
NODE = "CLUSTERKIT_TEST_NODE"


class Nodes:
    """The nodes of one Ray."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ck-ray-"))  # Ray's sockets want a short path
        self.port = free_port()
        self.environment = {**ENVIRONMENT, "RAY_ADDRESS": f"{HEAD}:{self.port}", "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment |= {"PYTHONPATH": f"{REPOSITORY}:{coin.FOLDER}:{STANDINS}", FOLDER: str(self.folder)}

    def start(self, address: str) -> None:
        """Start a node: the head, or a worker with a GPU."""
        where = [f"--address={self.environment['RAY_ADDRESS']}", "--num-gpus=1"]
        if address == HEAD:
            where = ["--head", f"--port={self.port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        start = [*RAY, "start", *where, *own_ports(), f"--node-ip-address={address}", "--num-cpus=4"]
        environment = {**self.environment, NODE: address}
        subprocess.run(start, check=True, env=environment, capture_output=True, timeout=DEADLINE_S)

    def lose(self, address: str) -> None:
        """Kill all that runs on a node: its Ray, and the ranks and servers that its Ray has started."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(NODE) == address and process.environ().get(FOLDER) == str(self.folder):
                    process.send_signal(signal.SIGKILL)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")
    found = Nodes()
    try:
        for address in (HEAD, *WORKERS):
            found.start(address)
        yield found
    finally:
        end_processes_of(found.folder)
        shutil.rmtree(found.folder, ignore_errors=True)


def test_two_hosts_are_lost_at_once_and_the_run_goes_on_when_they_are_back(nodes: Nodes, tmp_path: Path) -> None:
    trial = Trial(tmp_path / "runs", tmp_path / "cache", mode="ray", **settings(len(WORKERS)))
    logs = trial.paths.logs
    logs.mkdir(parents=True)
    config = shutil.copy(trial.file, logs / "config.yaml")
    console = (tmp_path / "job.log").open("w")
    job = subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.job", str(config)],
        env={**nodes.environment, "CLUSTERKIT_SGLANG_PYTHON": sys.executable},
        stdout=console, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lost = WORKERS[:2]
    try:
        go_through_a_loss(
            logs, lambda: [nodes.lose(address) for address in lost], lambda: [nodes.start(address) for address in lost]
        )
        assert job.wait(DEADLINE_S) == 0
    finally:
        if job.poll() is None:
            os.kill(job.pid, signal.SIGKILL)
        console.close()
        for said in (tmp_path / "job.log", *logs.glob("main.log")):
            print(said.read_text())  # pytest shows it where the test fails
    ranks = next(line for line in trial.log().splitlines() if "ranks run on" in line)
    assert ranks.split("ranks run on ")[1].split(", ") == list(WORKERS)
    assert_went_on(logs)
    assert trial.summary()["status"] == "completed"
