"""A cluster as dispatch sees one, without containers: a real Ray with its job API, a real SSH server, and a folder.

What `clusterkit setup` makes is tested in tests/cluster; here is what jobs do, in seconds. Jobs run with this
interpreter, and the storage is a folder of this machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from runs import ENVIRONMENT, REPOSITORY, wait_for
from sshd import Ssh, free_port, require_sshd

from clusterkit.provision.ray.ports import Ports
from clusterkit.runs.directory import user_name
from tests.realparts import require

NAME = "c"
FOLDER = "CLUSTERKIT_TEST_RAY"
CLUSTERKIT = [sys.executable, "-m", "clusterkit.cli.main"]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass
class RayCluster:
    """storage: what the hosts share. environment: of the operator's commands."""

    storage: Path
    environment: dict[str, str]

    @property
    def fileroot(self) -> Path:
        """Where the cluster's runs lie."""
        return self.storage / "ray" / "experiments"

    def stop_jobs(self) -> None:
        """Stop every job that has not ended."""
        for job in _asked(""):
            if job["status"] not in ("STOPPED", "SUCCEEDED", "FAILED"):
                _asked(f"{job['submission_id']}/stop", method="POST")

    def logs(self) -> str:
        """The ends of what Ray and its jobs wrote, and what runs: for when something does not happen."""
        folder = self.storage.parent / "ray" / "session_latest" / "logs"
        names = ("raylet.out", "runtime_env_agent.log", "job-driver-*", "worker-*.err", "worker-*.out")
        files = sorted((path for name in names for path in folder.glob(name)), key=lambda path: path.stat().st_mtime)
        ends = [f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in files if path.stat().st_size]
        running = subprocess.run(["ps", "-eo", "pid,ppid,etime,pcpu,args"], capture_output=True, text=True, check=False)
        return "\n".join([*ends, running.stdout])

    def start(self, *words: str | Path, cwd: Path) -> subprocess.Popen[str]:
        """A command of the operator's, left running in a session of its own as in a terminal."""
        pipes: dict[str, Any] = {"stdout": (cwd / "stdout").open("w"), "stderr": (cwd / "stderr").open("w")}
        argv = [*CLUSTERKIT, *map(str, words)]
        return subprocess.Popen(argv, cwd=cwd, env=self.environment, text=True, start_new_session=True, **pipes)

    def __call__(self, *words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A command, run to its end."""
        argv = [*CLUSTERKIT, *map(str, words)]
        done = subprocess.run(
            argv, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done


@contextmanager
def running(gpus: int) -> Iterator[RayCluster]:
    """The cluster for the length of a block; Ray believes in so many GPUs."""
    require_sshd()
    packages = ("ray", "aiohttp_cors", "opencensus")
    require(all(map(importlib.util.find_spec, packages)), "needs Ray's job API: pip install 'ray[default]'")
    require(_free(Ports().dashboard), f"port {Ports().dashboard} is in use: by another Ray?")
    folder = Path(tempfile.mkdtemp(prefix="ck-"))  # Ray's sockets want a short path
    folder.chmod(0o755)
    world = Ssh(folder)
    address = f"127.0.0.1:{free_port()}"
    python = Path(sys.executable)
    ray = {**ENVIRONMENT, "RAY_ADDRESS": address, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    ray |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(REPOSITORY), FOLDER: str(folder)}
    start = [*RAY, "start", "--head", f"--port={address.partition(':')[2]}", f"--temp-dir={folder / 'ray'}"]
    start += ["--include-dashboard=true", f"--dashboard-port={Ports().dashboard}", "--num-cpus=4"]
    # Ports of its own: other tests may have a Ray, too.
    start += [f"--num-gpus={gpus}", "--node-ip-address=127.0.0.1", *own_ports()]
    try:
        subprocess.run(start, check=True, env=ray, capture_output=True, timeout=300)
        wait_for(_answers)
        yield RayCluster(_storage(world), _operator(world))
    finally:
        end_processes_of(folder)
        world.servers.close()
        shutil.rmtree(folder, ignore_errors=True)


def _operator(world: Ssh) -> dict[str, str]:
    """The cluster's file and token, as `clusterkit setup` keeps them, and what finds them."""
    host = world.servers()
    clusters = world.folder / "config" / "clusters"
    (clusters / NAME).mkdir(parents=True)
    values = {
        "hosts": [{"name": "h1", "address": host.address, "port": host.port}],
        "storage": str(world.folder / "storage"),
        "login": {"identity_files": [str(world.key)]},
    }
    (clusters / f"{NAME}.yaml").write_text(yaml.safe_dump(values))
    token = clusters / NAME / "ray_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    return {**ENVIRONMENT, "HOME": str(world.home), "CLUSTERKIT_CONFIG": str(world.folder / "config")}


def _storage(world: Ssh) -> Path:
    storage = world.folder / "storage"
    for name in ("codes", "models", "datasets", f"ray/experiments/logs/{user_name()}"):
        (storage / name).mkdir(parents=True)
    return storage


def _free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _asked(what: str, method: str = "GET") -> Any:
    """Answer of Ray's job API."""
    request = urllib.request.Request(f"http://127.0.0.1:{Ports().dashboard}/api/jobs/{what}", method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def _answers() -> bool:
    try:
        return isinstance(_asked(""), list)
    except OSError:
        return False


def own_ports() -> list[str]:
    """Options of `ray start` for what Ray would put on the same ports on each machine."""
    return [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]


def end_processes_of(folder: Path) -> None:
    """End the Ray that was started with this folder, also as the variable FOLDER, and no other one of this machine."""
    mine = [process for process in psutil.process_iter() if _belongs(process, str(folder))]
    family = {child for p in mine for child in p.children(recursive=True)} | set(mine)
    for process in family:  # told to end in order, Ray's node waits ten seconds for its workers
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(family), timeout=10)


def _belongs(process: psutil.Process, folder: str) -> bool:
    """Whether it is one of that Ray's: some are told the folder, and one is told nothing but what it inherits."""
    with suppress(psutil.Error):
        return any(word.startswith("ray") or "/ray" in word for word in process.cmdline()) and (
            folder in " ".join(process.cmdline()) or process.environ().get(FOLDER) == folder
        )
    return False
