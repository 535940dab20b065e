"""Two commands at once on one cluster: the lock on this machine, the lease on the head node, over real processes and
real SSH. The lease lies in a folder of the test in place of /etc/clusterkit.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from clusterkit.check.needs import Needs
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision import claim as module
from clusterkit.provision import setup as engine
from clusterkit.provision.claim import STALE_S, Claim, ClaimedError, Lease, claimed, leased
from clusterkit.provision.model import Report, State
from clusterkit.provision.runner import HostRunner
from clusterkit.provision.setup import Request, Setup, Stage
from clusterkit.ssh.api import HostError, Result, Session, Trouble
from clusterkit.ssh.connection import connect
from clusterkit.steps.api import Wish

pytest_plugins = ["sshd_fixture"]
pytestmark = pytest.mark.timeout(120)

HERE = Claim("lab", "setup", "a" * 16, "ann@laptop", 11, "2026-01-02 03:04:05 UTC")
THERE = replace(HERE, place="b" * 16, who="bob@desk", process=22)
HOLDING = """
import sys, time
from clusterkit.provision.claim import claimed
with claimed("lab", "down"):
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
        with pytest.raises(ClaimedError) as caught, claimed("lab", "setup"):
            pass
        assert f"`clusterkit down` of {os.environ.get('USER', 'root')}@" in str(caught.value)
        assert f"(process {holder.pid}), since 20" in str(caught.value)
        assert "Wait until it is done" in str(caught.value)
        assert caught.value.exit_code == 2
        with claimed("other", "setup"):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with claimed("lab", "setup") as first:
        pass
    with claimed("lab", "setup") as second:
        assert second.place == first.place, "by this its lease is known as one of this machine"


# -- the head node ----------------------------------------------------------------------------------------------------


def lease_file(places: Path) -> Path:
    return places / "lab" / "lease"


def test_a_lease_keeps_others_out_until_it_is_given_back(places: Path) -> None:
    said: list[str] = []

    async def both() -> str:
        head = LocalSession()
        mine, theirs = Lease(HERE, said.append), Lease(THERE, said.append)
        await mine.take(head)
        assert lease_file(places).stat().st_mode & 0o077 == 0
        with pytest.raises(ClaimedError) as caught:
            await theirs.take(head)
        await theirs.release()  # which they do not hold
        assert lease_file(places).read_text().startswith(HERE.place)
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
    assert said == []


@pytest.mark.parametrize("age", [STALE_S + 5, -STALE_S - 60])
def test_a_lease_that_nobody_refreshes_is_taken_over(places: Path, age: int) -> None:
    async def both() -> None:
        head = LocalSession()
        dead, alive = Lease(THERE, print), Lease(HERE, print)
        await dead.take(head)
        os.utime(lease_file(places), (time.time() - age,) * 2)
        await alive.take(head)
        await dead.release()
        assert lease_file(places).read_text().startswith(HERE.place), "the old holder does not take it away"
        await alive.release()

    asyncio.run(both())


def test_a_killed_command_does_not_keep_its_own_machine_out(places: Path) -> None:
    async def again() -> None:
        head = LocalSession()
        await Lease(HERE, print).take(head)
        after = Lease(replace(HERE, process=99), print)
        await after.take(head)
        assert "process 99" in lease_file(places).read_text()
        await after.release()

    asyncio.run(again())


def test_the_running_command_refreshes_it_and_says_when_it_is_lost(places: Path) -> None:
    said: list[str] = []

    async def scenario() -> None:
        lease = Lease(HERE, said.append, refresh_s=0.02)
        await lease.take(LocalSession())
        os.utime(lease_file(places), (1.0, 1.0))
        async with asyncio.timeout(20):
            while lease_file(places).stat().st_mtime < 2:
                await asyncio.sleep(0.01)
            lease_file(places).write_text(f"{THERE.place}\n")
            while not said:
                await asyncio.sleep(0.01)
        await lease.release()

    asyncio.run(scenario())
    assert said == ["the head node was out of reach for long, and somebody else works on this cluster by now"]
    assert lease_file(places).read_text() == f"{THERE.place}\n"


class Lost(LocalSession):
    """A connection that is lost whenever it is used."""

    async def run(self, script: str, **options: object) -> Result:  # type: ignore[override]
        raise HostError("head", Trouble.LOST, "the connection was lost")


def test_no_trouble_of_the_lease_ends_a_set_up(places: Path) -> None:
    said: list[str] = []
    places.write_text("no folder")

    async def scenario() -> None:
        for head in (LocalSession(), Lost()):
            async with leased(HERE, head, said.append):
                pass
        async with leased(HERE, None, said.append):
            pass
        places.unlink()
        lease = Lease(HERE, said.append, refresh_s=0.01)
        await lease.take(LocalSession())
        lease._head = Lost()
        await asyncio.sleep(0.1)  # several rounds that fail
        await lease.release()

    asyncio.run(scenario())
    assert len(said) == 2
    assert all(text.startswith("no lease could be taken on the head node") for text in said)


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
        async with leased(THERE, LocalSession(), print):
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
    request = Request(cluster, cluster.hosts[only], Wish(cluster), Needs(), tmp_path / "logs", dry=dry, stages=(stage,))

    async def connected(host: Host) -> Session:
        return await connect(host, ssh.options(connect_timeout=2.0, username="root"))

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
        with pytest.raises(ClaimedError, match="bob@desk"):
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
    assert stage.hosts == [("worker", False)]
