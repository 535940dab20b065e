"""Two commands at once on one cluster: the lock on this machine, the leases on the hosts, over real processes and real
SSH. The lease lies in a folder of the test in place of /etc/clusterkit.

Storage without locks cannot be mounted here; the kernel is told to answer flock as such storage does (seccomp).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require
from sshd import Ssh, free_port, wait_until

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision import cluster_lock as module
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.cluster_lock import (
    STALE_S,
    ClusterLockedError,
    Lease,
    LeaseLostError,
    LockOwner,
    local_lock,
    new_lock_owner,
    remote_lease,
)
from clusterkit.provision.steps.step import DesiredState
from clusterkit.runs.directory import user_name
from clusterkit.setup import setup as engine
from clusterkit.setup.model import Report, State
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Request, Setup, Stage
from clusterkit.ssh.api import ErrorKind, HostError, Result, Session
from clusterkit.ssh.connection import connect

pytest_plugins = ["sshd_fixture"]
HERE = LockOwner("lab", "setup", "a" * 16, "ann@laptop", 11, "2026-01-02 03:04:05 UTC")
THERE = replace(HERE, identity="b" * 16, who="bob@desk", process=22)
HOLDING = """
import sys, time
from clusterkit.provision.cluster_lock import local_lock
with local_lock("lab", "down"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the test for what this machine and the head keep; the head's is returned."""
    require(os.geteuid() == 0, "the scripts run as root")
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    node = tmp_path / "etc"
    monkeypatch.setattr(module, "NODE_FOLDER", str(node))
    monkeypatch.setattr(module, "node_folder", lambda cluster: f"{node}/{cluster}")
    return node


# -- this machine -----------------------------------------------------------------------------------------------------


def test_the_lock_names_its_holder_and_ends_with_its_process() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ClusterLockedError) as caught, local_lock("lab", "setup"):
            pass
        assert f"`clusterkit down` of {os.environ.get('USER', 'root')}@" in str(caught.value)
        assert f"(process {holder.pid}), since 20" in str(caught.value)
        assert "Wait until it is done" in str(caught.value)
        assert caught.value.exit_code == 2
        with local_lock("other", "setup"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with local_lock("lab", "setup") as first:
        pass
    with local_lock("lab", "setup") as second:
        assert second.identity != first.identity, "what stands in a file that others may share makes nobody the same"


# -- the head node ----------------------------------------------------------------------------------------------------


def lease_file(places: Path) -> Path:
    return places / "lab" / "lease"


def unexpected(error: LeaseLostError) -> None:
    raise AssertionError(str(error))


def test_a_lease_keeps_others_out_until_it_is_given_back(places: Path) -> None:
    async def both() -> str:
        head = LocalSession()
        mine, theirs = Lease(HERE, unexpected), Lease(THERE, unexpected)
        await mine.take(head)
        assert lease_file(places).stat().st_mode & 0o077 == 0
        with pytest.raises(ClusterLockedError) as caught:
            await theirs.take(head)
        await theirs.release()  # which they do not hold
        assert lease_file(places).read_text().startswith(HERE.identity)
        await mine.release()
        assert not places.exists(), "nothing is left where nothing was"
        await theirs.take(head)
        (places / "lab" / "ray_token").write_text("x")
        await theirs.release()
        assert [path.name for path in (places / "lab").iterdir()] == ["ray_token"]
        return str(caught.value)

    told = asyncio.run(both())
    assert "`clusterkit setup` of ann@laptop (process 11), since 2026-01-02 03:04:05 UTC; last heard of " in told
    assert "Wait until that is done" in told


@pytest.mark.parametrize("age", [STALE_S + 5, -STALE_S - 60])
def test_a_lease_that_nobody_renews_is_taken_over(places: Path, age: int) -> None:
    async def both() -> None:
        head = LocalSession()
        dead, alive = Lease(THERE, print), Lease(HERE, unexpected)
        await dead.take(head)
        os.utime(lease_file(places), (time.time() - age,) * 2)
        await alive.take(head)
        await dead.release()
        assert lease_file(places).read_text().startswith(HERE.identity), "the old holder does not take it away"
        await alive.release()

    asyncio.run(both())


def test_of_those_who_come_in_the_same_moment_one_gets_it(places: Path) -> None:
    """Each makes the folder, and who is refused or is through removes it."""

    async def one(number: int) -> str | None:
        lease = Lease(replace(HERE, identity=f"{number:016x}"), unexpected)
        try:
            await lease.take(LocalSession())
        except ClusterLockedError:
            return None
        assert lease_file(places).read_text().startswith(lease.owner.identity)
        await asyncio.sleep(0)
        held = lease_file(places).read_text().split()[0]
        await lease.release()
        return held

    async def scenario() -> list[str | None]:
        return await asyncio.gather(*(one(number) for number in range(12)))

    for _ in range(3):
        assert any(asyncio.run(scenario()))
        assert not places.exists()


@pytest.mark.parametrize("machine", ["its own", "another"])
def test_a_killed_command_keeps_only_other_machines_out(places: Path, machine: str) -> None:
    code = (
        "from clusterkit.provision.cluster_lock import new_lock_owner\n"
        "print(new_lock_owner('lab', 'down').content().decode(), end='')"
    )
    content = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.decode()
    if machine == "another":
        lines = content.splitlines()
        lines[2] = " ".join(["6f1c", *lines[2].split()[1:]])  # of another start of a kernel
        content = "\n".join(lines)
    lease_file(places).parent.mkdir(parents=True)
    lease_file(places).write_text(content)

    async def take(claim: LockOwner) -> None:
        lease = Lease(claim, unexpected)
        await lease.take(LocalSession())
        await lease.release()

    with (
        contextlib.nullcontext() if machine == "its own" else pytest.raises(ClusterLockedError, match="clusterkit down")
    ):
        asyncio.run(take(new_lock_owner("lab", "setup")))
    # A process that lives is never taken for gone.
    lease_file(places).parent.mkdir(parents=True, exist_ok=True)
    lease_file(places).write_bytes(new_lock_owner("lab", "down").content())
    with pytest.raises(ClusterLockedError):
        asyncio.run(take(new_lock_owner("lab", "setup")))


def test_the_running_command_renews_it_and_stops_when_it_is_lost(places: Path) -> None:
    async def scenario() -> None:
        lost: asyncio.Future[LeaseLostError] = asyncio.get_running_loop().create_future()
        lease = Lease(HERE, lost.set_result, refresh_s=0.02)
        await lease.take(LocalSession())
        os.utime(lease_file(places), (1.0, 1.0))
        async with asyncio.timeout(20):
            while lease_file(places).stat().st_mtime < 2:
                await asyncio.sleep(0.01)
            lease_file(places).unlink()  # `down` removes what is the cluster's
            while not lease_file(places).exists():
                await asyncio.sleep(0.01)
            assert not lost.done()
            lease_file(places).write_bytes(THERE.content())
            os.utime(lease_file(places), (1.0, 1.0))  # even where they are gone by now: they were at work
            error = await lost
        assert error.taken
        assert error.exit_code == 1
        assert str(error).startswith("the lease on here was lost: `clusterkit setup` of bob@desk")
        await lease.release()

    asyncio.run(scenario())
    assert lease_file(places).read_bytes() == THERE.content()


def test_the_loss_ends_the_work_in_the_middle(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lease.__init__, "__defaults__", (0.02, 100.0))
    reached: list[str] = []

    async def scenario() -> None:
        async with remote_lease(HERE, [LocalSession()]) as refused:
            assert refused == {}
            lease_file(places).write_bytes(THERE.content())
            reached.append("work")
            await asyncio.sleep(60)
            reached.append("end")

    with pytest.raises(LeaseLostError, match=r"bob@desk.*\nThis command was stopped in the middle"):
        asyncio.run(scenario())
    assert reached == ["work"]


class Lost(LocalSession):
    """A connection that is lost whenever it is used."""

    async def run(self, script: str, **options: object) -> Result:  # type: ignore[override]
        raise HostError("head", ErrorKind.LOST, "the connection was lost")


def test_what_cannot_be_leased_is_refused(places: Path, tmp_path: Path) -> None:
    """No folder, no flock, a lock that fails, a connection that is lost: an error that says so, never a note."""

    def refusal(head: LocalSession) -> HostError:
        with pytest.raises(HostError) as caught:
            asyncio.run(Lease(HERE, unexpected).take(head))
        return caught.value

    def with_flock(script: str) -> LocalSession:
        # A stand-in: no file system without locks can be mounted here; `flock` says what it says on one.
        command = tmp_path / "bin" / "flock"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        return LocalSession(environment={"PATH": f"{command.parent}:{os.environ['PATH']}"})

    assert refusal(Lost()).kind is ErrorKind.LOST
    error = refusal(with_flock("echo 'flock: 9: No locks available' >&2; exit 69"))
    assert error.kind is ErrorKind.WRITE
    assert "the lease in " in error.message
    assert "it cannot be locked" in error.message
    assert "flock of util-linux" in error.fix
    (places / "lab").rmdir()
    places.rmdir()
    places.write_text("no folder")
    assert "cannot be taken: mkdir: " in refusal(LocalSession()).message

    async def scenario() -> None:
        async with remote_lease(HERE, [Lost("head"), LocalSession("worker")]) as refused:
            assert list(refused) == ["head", "worker"], "each by itself"

    asyncio.run(scenario())


def test_a_lease_that_cannot_be_renewed_is_given_up_before_it_is_anybodys(places: Path) -> None:
    async def scenario() -> LeaseLostError:
        lost: asyncio.Future[LeaseLostError] = asyncio.get_running_loop().create_future()
        lease = Lease(HERE, lost.set_result, refresh_s=0.01, give_up_s=0.1)
        await lease.take(LocalSession())
        lease._host = Lost("head")
        async with asyncio.timeout(20):
            error = await lost
        await lease.take(LocalSession())  # over another connection it goes on
        await lease.release()
        return error

    error = asyncio.run(scenario())
    assert not error.taken
    assert "the lease on head could not be renewed for 0 s" in str(error)
    assert not places.exists()


# -- two machines -----------------------------------------------------------------------------------------------------

OPERATOR = """
import asyncio, ctypes, errno, os, platform, sys
from pathlib import Path
from clusterkit.hosts.model import Host
from clusterkit.provision import cluster_lock as claim
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
from trainer import locks
from trainer.errors import UserError

port, key, node, machine, flock = sys.argv[1:]
claim.NODE_FOLDER, claim.node_folder = node, lambda cluster: f"{node}/{cluster}"
claim._MACHINE_ID = Path(machine)
if machine != "/etc/machine-id":  # another kernel's
    birth = claim._birth
    claim._birth = lambda process: "another " + birth(process).partition(" ")[2]

if flock:  # the kernel answers flock(2) with this errno; 0: "done", as a mount does whose locks are each machine's own
    class Filter(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]
    number = {"x86_64": 73, "aarch64": 32}[platform.machine()]
    answer, allow = (0x06, 0, 0, 0x50000 | int(flock)), (0x06, 0, 0, 0x7FFF0000)
    rules = (Filter * 4)((0x20, 0, 0, 0), (0x15, 0, 1, number), answer, allow)
    if flock == "0":  # such a mount refuses a second lock of the same machine, which is what the look is for
        locks._held_by_nobody = lambda file: False
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
    assert libc.prctl(22, 2, ctypes.byref(Program(4, rules)), 0, 0) == 0, "PR_SET_SECCOMP"

async def main():
    with claim.local_lock("lab", "setup") as ours:
        host = Host(name="head", address="127.0.0.1", port=int(port), username="root")
        session = await connect(host, SshOptions(private_key_files=(key,)))
        async with claim.remote_lease(ours, [session]) as refused:
            print("held", dict(refused), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        await session.close()
try:
    asyncio.run(main())
except UserError as error:
    print("refused", error, flush=True)
    sys.exit(error.exit_code)
"""


@dataclass
class Machine:
    """An operator's machine: a machine id of its own, and a home and state folder that all of them share."""

    ssh: Ssh
    port: int
    places: Path
    machine_id: Path
    flock: str

    def start(self) -> subprocess.Popen[str]:
        words = [str(self.port), str(self.ssh.key), str(self.places), str(self.machine_id), self.flock]
        return subprocess.Popen(
            [sys.executable, "-c", OPERATOR, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def outcome(self) -> tuple[str, int]:
        process = self.start()
        said, _ = process.communicate(timeout=300)
        return said, process.returncode


def test_two_machines_with_one_home_on_storage_without_locks(ssh: Ssh, tmp_path: Path, places: Path) -> None:
    """Locks that each machine has for itself: the lease keeps them apart, whatever the shared state folder says."""
    port = ssh.servers().port
    (tmp_path / "machine-id").write_text("0" * 32)
    desk = Machine(ssh, port, places, tmp_path / "machine-id", "0")
    laptop = Machine(ssh, port, places, Path("/etc/machine-id"), "0")
    none = Machine(ssh, port, places, Path("/etc/machine-id"), str(errno.ENOLCK))

    said, code = none.outcome()
    assert code == 2
    assert "lock cannot be locked: file locks fail (No locks available)" in said
    assert "\nSet CLUSTERKIT_STATE to a folder" in said
    assert not places.exists()

    holder = desk.start()
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held {}\n"
        for rival in (laptop, desk):  # another machine, and another process of the same one
            said, code = rival.outcome()
            assert code == 2, said
            assert f"refused cluster lab is being worked on by `clusterkit setup` of {user_name()}@" in said
            assert f"(process {holder.pid})" in said
    finally:
        holder.kill()
        holder.wait()
    said, code = laptop.outcome()
    assert code == 2, "that it is gone cannot be known here; the lease has to run out"
    assert desk.outcome()[0] == "held {}\n", "where it ran that is known at once"
    # In the same second: exactly one works at a time, and nobody is lost in between.
    both = [machine.start() for machine in (desk, laptop, desk, laptop)]
    firsts = [process.stdout.readline() for process in both if process.stdout is not None]
    assert sorted(first.split()[0] for first in firsts) == ["held", "refused", "refused", "refused"]
    assert sorted(code for process in both for code in [process.communicate(timeout=300) and process.returncode]) == [
        0,
        2,
        2,
        2,
    ]


# -- a whole set-up ---------------------------------------------------------------------------------------------------


@dataclass
class Reached(Stage):
    """Notes who came so far, and looks at the lease on the way."""

    places: Path
    name: str = "reached"

    def __post_init__(self) -> None:
        self.hosts: list[tuple[str, bool]] = []

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        self.hosts.append((runner.host.name, lease_file(self.places).exists()))
        runner.show(self.name, State.OK)

    async def observe(self, setup: Setup, head: HostRunner) -> None:
        """Nothing to see."""


@contextlib.asynccontextmanager
async def somebody_else(held: bool) -> AsyncIterator[None]:
    if held:
        async with remote_lease(THERE, [LocalSession()]):
            yield
    else:
        yield


def set_up(
    ssh: Ssh,
    hosts: list[Host],
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    held: bool = False,
    dry: bool = False,
    only: slice = slice(None),
) -> Report:
    """No step changes this machine; nobody minds what it is."""
    monkeypatch.setattr(engine, "STEPS", ())
    for judge in ("judge_host", "judge_gpus", "judge_cluster"):
        monkeypatch.setattr(engine, judge, lambda *_: ())
    cluster = Cluster(name="lab", hosts=tuple(hosts))
    (tmp_path / "logs").mkdir(exist_ok=True)
    request = Request(
        cluster, cluster.hosts[only], DesiredState(cluster), Needs(), tmp_path / "logs", dry=dry, stages=(stage,)
    )

    async def connected(host: Host) -> Session:
        return await connect(host, ssh.options(connect_timeout=30.0, username="root"))

    async def scenario() -> Report:
        async with somebody_else(held):
            return await Setup(request, connected, lambda _: None, HERE).run()

    return asyncio.run(scenario())


def test_nobody_is_changed_while_somebody_else_is_at_work(
    ssh: Ssh, tmp_path: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [ssh.servers().host("head"), ssh.servers().host("worker")]
    stage = Reached(places)
    for only in (slice(None), slice(1, None)):
        with pytest.raises(ClusterLockedError, match="bob@desk"):
            set_up(ssh, hosts, stage, tmp_path, monkeypatch, held=True, only=only)
    assert stage.hosts == []
    assert set_up(ssh, hosts, stage, tmp_path, monkeypatch, held=True, dry=True).exit_code == 0, "a dry run asks nobody"

    report = set_up(ssh, hosts, stage, tmp_path, monkeypatch)
    assert report.exit_code == 0, report.as_dict()
    assert sorted(stage.hosts) == [("head", True), ("worker", True)]
    assert wait_until(lambda: not places.exists())
    set_up(ssh, hosts, stage, tmp_path, monkeypatch, dry=True)
    assert not places.exists()


def test_a_head_that_is_down_keeps_nobody_from_what_can_be_done(
    ssh: Ssh, tmp_path: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [Host(name="head", address="127.0.0.1", port=free_port()), ssh.servers().host("worker")]
    stage = Reached(places)
    report = set_up(ssh, hosts, stage, tmp_path, monkeypatch)
    assert [host.name for host in report.failed] == ["head"]
    assert stage.hosts == [("worker", True)], "which has a lease of its own"
