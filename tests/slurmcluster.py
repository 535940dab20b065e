"""A real Slurm on this one machine, for tests: munged, slurmctld and two slurmd, in a folder of their own (as root)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from realparts import require

DAEMONS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun")
NODES = ("first", "second")
PARTITION = "main"
READY_SECONDS = 60.0
_PATH = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"


@dataclass
class Slurm:
    """A running Slurm. environment: what commands need to find it."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout

    def jobs(self, what: str = "%i %T") -> list[str]:
        """A line for every job that waits, runs or has just ended."""
        return self.run("squeue", "--noheader", "--states=all", f"--format={what}").splitlines()

    def alive(self) -> list[str]:
        """Numbers of the jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def state(self) -> str:
        """Nodes with their states and why they are out of use, where they are."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%N %t %E")

    def cancel_all(self) -> None:
        """End every job and wait until the nodes are free."""
        for job in self.alive():
            self.run("scancel", job)
        _wait(lambda: not self.alive(), "jobs do not end")

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start Slurm for the length of a block; its jobs and daemons end with it."""
    missing = [name for name in DAEMONS if not shutil.which(name, path=_PATH)]
    require(not missing, f"Slurm is not installed here: {', '.join(missing)} (scripts/test-tools.sh installs it)")
    require(os.geteuid() == 0, "Slurm's daemons need root")
    folder.chmod(0o755)
    munge = folder / "munge"
    munge.mkdir(mode=0o700)
    controller, *ports = (_free_port() for _ in range(1 + len(NODES)))
    (folder / "slurm.conf").write_text(_configuration(folder, controller, ports))
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run(["mungekey", "--create", f"--keyfile={munge / 'key'}"], env=environment, check=True)
    places = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    commands = [
        ["munged", "--foreground", "--force", *(f"--{option}={munge / name}" for option, name in places.items())],
        ["slurmctld", "-D", "-c", "-i"],
        *(["slurmd", "-D", "-N", node] for node in NODES),
    ]
    processes = []
    try:
        for command in commands:
            log = (folder / f"{command[0]}-{command[-1].strip('-')}".split("=")[0]).with_suffix(".log")
            with log.open("ab") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
                )
            if command[0] == "munged":
                _wait((munge / "socket").exists, "munged does not start")
                munge.chmod(0o711)
        made = Slurm(folder, environment)
        _wait(lambda: _idle(made) == len(NODES), f"the nodes do not come up\n{made.logs()}")
        yield made
        made.cancel_all()
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configuration(folder: Path, controller: int, ports: list[int]) -> str:
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
        for name, port in zip(NODES, ports, strict=True)
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
MinJobAge=300
MessageTimeout=60
SlurmctldTimeout=300
SlurmdTimeout=300
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
{nodes}
PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def _idle(made: Slurm) -> int:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %t"],
        env=made.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return sum(line.split()[1:] == ["idle"] for line in done.stdout.splitlines())


def _wait(condition, what: str) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + READY_SECONDS
    while not condition():
        if time.monotonic() > end:
            pytest.fail(what)
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
