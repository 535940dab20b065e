"""The probe run for real on this machine, by several shells; stand-ins for commands that hang or are not here."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather, probe_script
from clusterkit.ssh.api import ErrorKind, HostError

SHELLS = {"dash": ("dash",), "bash": ("bash", "--posix"), "busybox": ("busybox", "sh")}
SMI = Path(__file__).parents[1] / "cases" / "nvidia_smi"


def look(wants: ProbeRequest, **session: object) -> Facts:
    return asyncio.run(gather(LocalSession(**session), wants))  # type: ignore[arg-type]


@pytest.mark.parametrize("shell", SHELLS)
def test_facts_of_this_machine(shell: str, tmp_path: Path) -> None:
    require(shutil.which(SHELLS[shell][0]) is not None, f"no {shell} here")
    managed = tmp_path / "a file.conf"
    managed.write_text("text\n")
    managed.chmod(0o640)
    link = tmp_path / "link.conf"
    link.symlink_to(managed)
    tmp_path.chmod(0o750)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        wants = ProbeRequest(
            storage=f"{tmp_path}/not/there",
            paths=(str(tmp_path),),
            files=(str(managed), str(link), "/does/not/exist"),
            ports=(port,),
            head_address="127.0.0.1",
            commands=("a-tool", "no-such-command"),
        )
        (tmp_path / "bin").mkdir()
        stand_in(tmp_path / "bin", "a-tool", "")

        facts = look(
            wants, shell=SHELLS[shell], environment={**first_in_path(tmp_path / "bin"), "OMP_NUM_THREADS": "1"}
        )

    disk = os.statvfs(tmp_path)
    assert facts.hostname == os.uname().nodename
    assert (facts.os.arch, facts.os.kernel) == (os.uname().machine, os.uname().release)
    assert facts.os.id
    assert facts.uid == os.geteuid()
    assert facts.cpus == len(os.sched_getaffinity(0))
    assert facts.memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.disks[str(tmp_path)].size == disk.f_blocks * disk.f_frsize
    assert facts.disks[str(tmp_path)].fstype
    assert not facts.disks[f"{tmp_path}/not/there"].exists
    assert facts.disks[f"{tmp_path}/not/there"].size == disk.f_blocks * disk.f_frsize
    assert facts.files == dict.fromkeys((str(managed), str(link)), hashlib.sha256(b"text\n").hexdigest())
    assert facts.modes[str(managed)] == facts.modes[str(link)] == 0o640  # chmod follows links, too
    assert facts.modes[str(tmp_path)] == 0o750
    assert "/does/not/exist" not in facts.modes
    assert port in facts.listening
    assert facts.commands == {"a-tool": f"{tmp_path}/bin/a-tool"}
    assert "nofile" in facts.hard_limits


@pytest.mark.parametrize("shell", SHELLS)
def test_package_sources_of_this_machine(shell: str) -> None:
    require(shutil.which(SHELLS[shell][0]) is not None, f"no {shell} here")
    files = [*Path("/etc/apt/sources.list.d").glob("*.list"), *Path("/etc/apt/sources.list.d").glob("*.sources")]
    require(bool(files), "no package sources of apt here")
    facts = look(ProbeRequest(packages=("dash",)), shell=SHELLS[shell])
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
        assert facts.apt_sources.get(str(file), "") == "\n".join(lines).rstrip("\n")


def test_the_listener_of_a_wanted_port_is_named() -> None:
    require(shutil.which("ss") is not None, "no ss here")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        facts = look(ProbeRequest(ports=(port, 1)))

    assert facts.extra["listeners"][str(port)]["pid"] == os.getpid()


def test_the_clock_of_this_machine_is_our_own() -> None:
    began = time.time()

    facts = look(ProbeRequest())

    assert began - 1 < facts.clock < time.time() + 1
    assert abs(facts.clock_offset) <= facts.clock_error + 0.01
    assert facts.clock_error < 5


def test_a_clock_that_is_wrong(tmp_path: Path) -> None:
    # A stand-in: the real clock is everybody's.
    stand_in(tmp_path, "date", "/bin/echo $(( $(/bin/date +%s) - 100 )).5")

    facts = look(ProbeRequest(), environment=first_in_path(tmp_path))

    assert facts.clock_offset == pytest.approx(-100, abs=2)


def test_one_round_trip_for_root() -> None:
    require(os.geteuid() == 0, "not root")
    session = LocalSession()

    facts = asyncio.run(gather(session, ProbeRequest()))

    assert facts.sudo == "root"
    assert len(session.scripts) == 1


def test_gpus_are_read_through_the_probe(tmp_path: Path) -> None:
    # A stand-in that prints what a host with two H200 prints.
    table = SMI / "h200_gpus.csv"
    stand_in(tmp_path, "nvidia-smi", f'case "$*" in *query-gpu*) cat {table} ;; esac')

    facts = look(ProbeRequest(), environment=first_in_path(tmp_path))

    assert [gpu.name for gpu in facts.gpus] == ["NVIDIA H200", "NVIDIA H200"]
    assert facts.nvidia_error == ""


def test_commands_that_hang_hold_nothing_else_up(tmp_path: Path) -> None:
    # Stand-ins: neither a hanging driver nor a hanging engine can be had at will.
    stand_in(tmp_path, "nvidia-smi", "trap '' TERM; sleep 60 & wait; sleep 60")
    stand_in(tmp_path, "docker", "exec sleep 60")
    began = time.monotonic()

    facts = look(ProbeRequest(limit=1), environment=first_in_path(tmp_path))

    assert time.monotonic() - began < 8
    assert facts.nvidia_error == "nvidia-smi gave no answer in time"
    assert facts.docker.error == "`docker info` gave no answer in time"
    assert facts.hostname == os.uname().nodename


def test_a_dead_mount_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    # A stand-in for stat: a network mount whose server is gone never lets it return.
    stand_in(tmp_path, "stat", f'case "$*" in *{tmp_path}/dead*) exec sleep 60 ;; esac; exec /usr/bin/stat "$@"')
    (tmp_path / "dead").mkdir()
    managed = tmp_path / "managed.conf"
    managed.write_text("text\n")

    wants = ProbeRequest(storage=f"{tmp_path}/dead", files=(str(managed),), limit=1)
    facts = look(wants, environment=first_in_path(tmp_path))

    assert facts.disks[f"{tmp_path}/dead"].timed_out
    assert facts.disks["/"].size > 0
    assert facts.files == {str(managed): hashlib.sha256(b"text\n").hexdigest()}
    assert str(managed) in facts.modes


def test_docker_is_asked_for_no_more_than_it_can_answer(tmp_path: Path) -> None:
    # A stand-in that notes how it was called and says what the real one says where no engine runs.
    said = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    stand_in(tmp_path, "docker", f'echo "$1" >>{tmp_path}/asked; echo "{said}" >&2; exit 1')
    asked = tmp_path / "asked"
    reachable = Path("/run/docker.sock").is_socket() or (Path.home() / ".docker/config.json").exists()

    facts = look(ProbeRequest(), environment=first_in_path(tmp_path))
    assert facts.docker.error == said
    assert sorted(asked.read_text().split()) == (["images", "info", "ps"] if reachable else ["info"])

    asked.unlink()
    look(ProbeRequest(), environment={**first_in_path(tmp_path), "DOCKER_HOST": "unix:///somewhere/else.sock"})
    assert sorted(asked.read_text().split()) == ["images", "info", "ps"]

    asked.unlink()
    look(ProbeRequest(docker=False), environment=first_in_path(tmp_path))
    assert not asked.exists()


def test_the_holder_of_the_package_lock_is_named() -> None:
    lock = Path("/var/lib/dpkg/lock-frontend")
    require(os.geteuid() == 0 and lock.parent.is_dir(), "needs root and dpkg")
    code = f"import fcntl, time; f = open('{lock}', 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        try:
            facts = look(ProbeRequest())
        finally:
            holder.communicate(b"\n")

    assert f"(pid {holder.pid})" in facts.lock_holder


def test_nothing_is_written(tmp_path: Path) -> None:
    require(os.geteuid() == 0 and shutil.which("unshare") is not None, "needs root and unshare")
    script = probe_script(ProbeRequest(storage=str(tmp_path)))
    # Everything read-only: a probe that writes anywhere fails or prints an error that it does not print otherwise.
    mounts = f"mount -o remount,bind,ro / 2>/dev/null; mount -t tmpfs -o ro none /tmp; {script}"

    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounts], capture_output=True, text=True, timeout=300, check=False
    )

    assert done.stdout.rstrip().endswith("@@end")
    assert "@@disks" in done.stdout
    assert "Read-only" not in done.stdout + done.stderr


def test_a_shell_that_prints_before_and_fails(tmp_path: Path) -> None:
    stand_in(tmp_path, "id", "exit 1")
    session = LocalSession(
        environment=first_in_path(tmp_path), shell=("sh", "-c", "echo no shell for you; exit 7", "sh")
    )

    with pytest.raises(HostError) as caught:
        asyncio.run(gather(session, ProbeRequest()))

    assert caught.value.kind is ErrorKind.LOST
    assert "no shell for you" in caught.value.message


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    evil = f"{tmp_path}/$(touch {tmp_path}/x)'; touch {tmp_path}/y; '"

    facts = look(ProbeRequest(storage=evil, files=(evil,), packages=(evil,), head_address=f"$(touch {tmp_path}/z)"))

    assert not list(tmp_path.iterdir())
    assert facts.hostname


def stand_in(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def first_in_path(folder: Path) -> dict[str, str]:
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
