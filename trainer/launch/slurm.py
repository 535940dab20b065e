"""`python -m trainer.launch.slurm CONFIG.yaml`: one task on every node of a Slurm allocation.

Every task keeps this node's Ray; the first one, whose Ray is the head, runs the job in it when all nodes have joined,
and leaves the job's exit code in a file. The batch script (clusterkit/backends/slurm/script.py) starts and ends the
tasks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.errors import RunError, UserError
from trainer.files import write_atomic
from trainer.signals import StopFlag

POLL_SECONDS = 0.5
HEAD_SECONDS = 180.0
"""A head that does not listen after so long is given up on its own node."""
START_SECONDS = 600.0
"""Nodes that have not joined after so long are given up; images may have to come to them first."""
END_SECONDS = 30.0
RESTART_SECONDS = 10.0
"""Between the end of a worker's Ray and its next start."""
FIRST_PORT, PORTS, SLOTS = 20000, 5, 2000
"""The head's ports by the job's number: jobs that share a node do not meet, and all lie below Linux's range for
outgoing connections. Everything else listens on ports that the system chooses."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Place:
    """One task of the allocation.

    job: Slurm's number of the job.
    head: address of the first node.
    number: number of this node in the allocation, from 0.
    nodes: number of nodes.
    name, cpus, gpus: of this node.
    state: folder of the files that tasks and batch script exchange.
    """

    job: int
    head: str
    number: int
    nodes: int
    name: str
    cpus: int
    gpus: int
    state: Path

    @classmethod
    def of(cls, environment: Mapping[str, str], gpus: int, state: Path) -> Place:
        """From the variables that Slurm and the batch script set. Raises UserError outside of an allocation."""
        try:
            return cls(
                int(environment["SLURM_JOB_ID"]),
                environment["CLUSTERKIT_HEAD"],
                int(environment["SLURM_PROCID"]),
                int(environment["SLURM_NNODES"]),
                environment.get("SLURMD_NODENAME") or socket.gethostname(),
                int(environment.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1),
                gpus,
                state,
            )
        except (KeyError, ValueError) as error:
            raise UserError(
                f"this is started by the batch script of clusterkit train --slurm only ({error})"
            ) from error

    @property
    def port(self) -> int:
        """Of Ray's head; the ones after it are the head's as well."""
        return FIRST_PORT + self.job % SLOTS * PORTS

    @property
    def address(self) -> str:
        """Of Ray."""
        return f"{self.head}:{self.port}"

    @property
    def folder(self) -> Path:
        """Ray's own files on this node. Short: the paths of its sockets may have a hundred characters."""
        return Path(f"/tmp/clusterkit-{os.getuid()}-{self.job}")

    @property
    def stop_file(self) -> Path:
        """Made by the batch script when the run is to end."""
        return self.state / f"job_{self.job}.stop"

    @property
    def exit_file(self) -> Path:
        """Where the batch script finds the job's exit code."""
        return self.state / f"job_{self.job}.exit"


def ray_command(place: Place, address: str) -> list[str]:
    """The command that starts this node's Ray and stays. address: of this node."""
    first, role = place.port, f"--address={place.address}"
    if place.number == 0:
        role = f"--head --port={first} --dashboard-host=127.0.0.1 --dashboard-port={first + 1} "
        role += f"--ray-client-server-port={first + 2} --temp-dir={place.folder}"
    # Two jobs on one node, or two nodes on one machine: ports that the system chooses never collide.
    ports = "--dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0"
    options = f"{role} --node-ip-address={address} --num-cpus={place.cpus} --num-gpus={place.gpus} {ports}".split()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    return [*command, "--block", "--log-color=false", "--disable-usage-stats", f"--node-name={place.name}", *options]


def ray_environment(place: Place, address: str) -> dict[str, str]:
    """Variables of this node's Ray, and of everything that it starts. What the site has set stays."""
    environment = {
        "AUTOSCALER_METRIC_PORT": str(place.port + 3),
        "DASHBOARD_METRIC_PORT": str(place.port + 4),
        "RAY_ADDRESS": place.address,
        "RAY_prestart_worker_first_driver": "0",  # else as many idle workers as there are CPUs
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # when Ray is ended here, nothing runs in it any more
    }
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface(address)):
        environment["GLOO_SOCKET_IFNAME"] = name
    return environment


def own_address(head: str) -> str:
    """The address of this node on the way to the head."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((head, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface(address: str) -> str:
    """Name of the network interface with that IPv4 address; "" without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


class Node:
    """Ray of this node."""

    def __init__(self, place: Place, stop: StopFlag) -> None:
        self.place, self._stop = place, stop
        self._ray: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it goes on by itself."""
        place = self.place
        address = place.head if place.number == 0 else own_address(place.head)
        if place.number == 0:
            _own_folder(place.folder)
        os.environ.update(ray_environment(place, address))
        output = sys.stderr.fileno()
        self._ray = subprocess.Popen(ray_command(place, address), stdin=subprocess.DEVNULL, stdout=output)

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._ray is not None and self._ray.poll() is None

    def end(self) -> None:
        """End it and what it has left on this node."""
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            try:
                self._ray.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._ray.kill()
        with suppress(OSError):
            if self.place.folder.lstat().st_uid == os.getuid():
                shutil.rmtree(self.place.folder, ignore_errors=True)

    def await_head(self) -> None:
        """Wait until the head listens. Raises RunError where it does not, or its process ends."""
        limit = HEAD_SECONDS if self.place.number == 0 else START_SECONDS
        deadline = time.monotonic() + limit
        while not self._stop():
            with suppress(OSError), socket.create_connection((self.place.head, self.place.port), timeout=5):
                return
            if self.place.number == 0 and not self.alive:
                raise RunError(f"Ray's head did not start on {self.place.name} (its words are above)")
            if time.monotonic() > deadline:
                raise RunError(f"Ray's head does not listen at {self.place.address} after {limit:.0f} s")
            time.sleep(POLL_SECONDS)


def keep_worker(place: Place, stop: StopFlag) -> int:
    """Keep this node in Ray until a signal ends it; a Ray that died is started again."""
    node = Node(place, stop)
    try:
        while not stop():
            node.await_head()
            node.start()
            while node.alive and not stop():
                time.sleep(POLL_SECONDS)
            if not stop():
                _say(f"the Ray of {place.name} has ended; it is started again in {RESTART_SECONDS:.0f} s")
                _pause(RESTART_SECONDS, stop)
    finally:
        node.end()
    return 0


def run_head(place: Place, config: Path, stop: StopFlag) -> int:
    """Start the head, wait for all nodes, run the job to its end; its exit code."""
    node, code = Node(place, stop), 1
    try:
        node.start()
        node.await_head()
        names = joined_nodes(place, stop)
        if stop() or place.stop_file.exists():
            code = 130
            return code
        _say(f"Ray has {len(names)} of {place.nodes} nodes: {', '.join(names)}")
        code = _run_job(place, config, stop)
        return code
    except UserError as error:
        _say(f"error: {error}")
        code = error.exit_code
        return code
    finally:
        # The batch script is told first, so that the other nodes end at the same time as this one.
        write_atomic(place.exit_file, f"{code}\n")
        node.end()


def _run_job(place: Place, config: Path, stop: StopFlag) -> int:
    job = subprocess.Popen([sys.executable, "-m", "trainer.launch.job", str(config)], stdin=subprocess.DEVNULL)
    stopping = False
    while job.poll() is None:
        if not stopping and (stop() or place.stop_file.exists()):
            stopping = True
            _say("to end: a recover checkpoint is written first")
            job.terminate()
        time.sleep(POLL_SECONDS)
    return job.returncode if job.returncode >= 0 else 128 - job.returncode


def joined_nodes(place: Place, stop: StopFlag) -> list[str]:
    """Names of the nodes in Ray, once all have joined or somebody wants an end. Raises RunError: they take too long."""
    import ray  # noqa: PLC0415 (one task of the allocation asks it; those of the other nodes stay small)

    deadline = time.monotonic() + START_SECONDS
    ray.init(address=place.address, log_to_driver=False, logging_level="WARNING")
    stop.install()  # Ray has put handlers of its own in place
    try:
        while True:
            names = sorted(str(node["NodeName"]) for node in ray.nodes() if node["Alive"])
            if len(names) >= place.nodes or stop() or place.stop_file.exists():
                return names
            if time.monotonic() > deadline:
                raise RunError(
                    f"only {len(names)} of {place.nodes} nodes have joined Ray within {START_SECONDS:.0f} s "
                    f"({', '.join(names)}): can they reach {place.address}? CLUSTERKIT_HEAD=ADDRESS in the environment "
                    "of clusterkit train names another address of the first node"
                )
            time.sleep(POLL_SECONDS)
    finally:
        ray.shutdown()
        stop.install()


def _own_folder(folder: Path) -> None:
    """Make the folder anew, for this user alone: everybody may make folders in /tmp."""
    with suppress(FileNotFoundError):
        if folder.lstat().st_uid != os.getuid():
            raise RunError(f"{folder} belongs to another user: remove it on {socket.gethostname()}")
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def _pause(seconds: float, stop: StopFlag) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not stop():
        time.sleep(POLL_SECONDS)


def _say(text: str) -> None:
    print(f"clusterkit: {text}", flush=True)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m trainer.launch.slurm CONFIG.yaml", file=sys.stderr)
        return 2
    # A task that is ending may get several signals; none may interrupt that.
    stop = StopFlag().install()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        config = Path(arguments[0])
        place = Place.of(os.environ, read_config(config, RunConfig).n_gpus_per_node, config.parent / "slurm")
        return run_head(place, config, stop) if place.number == 0 else keep_worker(place, stop)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
