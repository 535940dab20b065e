"""What ends the set-up of one host, and what ends that of all, while others are in the middle of a command: real SSH
servers, no step that would change this machine. The leases lie in a folder of the test in place of /etc/clusterkit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from realparts import require
from sshd import Ssh, tarpit

from clusterkit.backends.base import RunSelector
from clusterkit.backends.ray import status
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision import cluster_lock as claims
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.cluster_lock import Lease, LockOwner
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps.step import Action, DesiredState
from clusterkit.setup import setup as module
from clusterkit.setup.model import HostReport, Report, State
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Request, Setup, Stage
from clusterkit.setup.view import summary
from clusterkit.ssh.api import Session
from clusterkit.ssh.connection import connect
from clusterkit.ssh.selection import Selection
from trainer.errors import UserError

pytest_plugins = ["sshd_fixture"]
HERE = LockOwner("lab", "setup", "a" * 16, "ann@laptop", 11, "2026-01-02 03:04:05 UTC")
THERE = replace(HERE, identity="b" * 16, who="bob@desk", process=22)


@pytest.fixture(autouse=True)
def node_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No step changes this machine; nobody minds what it is or that all servers are one machine."""
    require(os.geteuid() == 0, "the scripts run as root")
    monkeypatch.setattr(module, "STEPS", ())
    for judge in ("judge_host", "judge_gpus", "judge_cluster"):
        monkeypatch.setattr(module, judge, lambda *_: ())
    monkeypatch.setattr(claims, "NODE_FOLDER", str(tmp_path / "etc"))
    monkeypatch.setattr(claims, "node_folder", lambda cluster: f"{tmp_path}/etc/{cluster}")
    return tmp_path / "etc"


class Work(Stage):
    """A command on every host that goes on until `go` is there; `odd` takes its place on some, once `first` others are
    in the middle of it.
    """

    name = "work"

    def __init__(self, folder: Path, odd: dict[str, Callable[[Setup], Awaitable[None]]], first: int = 1) -> None:
        self.folder, self.odd, self.first = folder, odd, first
        self.working = asyncio.Event()

    def begun(self, _: str) -> None:
        self.first -= 1
        if not self.first:
            self.working.set()

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        name, session = runner.host.name, runner.session
        assert session is not None
        async with runner.timed(self.name):
            if name in self.odd:
                await self.working.wait()
                await self.odd[name](setup)
            else:
                script = f"echo begun; while [ ! -e {self.folder}/go ]; do sleep 0.05; done; : >{self.folder}/{name}"
                await session.run(script, on_output=self.begun)
        runner.show(self.name, State.OK)


def set_up(
    ssh: Ssh,
    tmp_path: Path,
    stage: Stage,
    watch: Callable[[HostReport], None] = lambda _: None,
    connected: Callable[[Host], Awaitable[None]] | None = None,
    claim: LockOwner | None = HERE,
) -> Report:
    """Set up `head`, `one` and `two`; connected: awaited ahead of every connection."""
    cluster = Cluster(name="lab", hosts=tuple(ssh.servers().host(name) for name in ("head", "one", "two")))
    (tmp_path / "logs").mkdir(exist_ok=True)
    request = Request(cluster, cluster.hosts, DesiredState(cluster), Needs(), tmp_path / "logs", stages=(stage,))

    async def opened(host: Host) -> Session:
        if connected is not None:
            await connected(host)
        return await connect(host, ssh.options(username="root"))

    return asyncio.run(Setup(request, opened, watch, claim).run())


def goes_on_after(name: str, folder: Path) -> Callable[[HostReport], None]:
    """The others' command ends only when this host has failed."""

    def watch(row: HostReport) -> None:
        if row.name == name and State.FAILED in row.states.values():
            (folder / "go").touch()

    return watch


async def breaks(_: Setup) -> None:
    raise ZeroDivisionError("nobody thought of this")


def test_an_error_that_nobody_foresaw_ends_one_host_and_the_others_finish(ssh: Ssh, tmp_path: Path) -> None:
    report = set_up(ssh, tmp_path, Work(tmp_path, {"one": breaks}), goes_on_after("one", tmp_path))
    assert [host.name for host in report.failed] == ["one"]
    assert report.exit_code == 3
    assert (tmp_path / "head").exists()
    assert (tmp_path / "two").exists()
    failure = report.hosts["one"].failure
    assert failure is not None
    assert failure.step == "work"
    assert failure.message == "ZeroDivisionError: nobody thought of this"
    log = Path(report.hosts["one"].log).read_text()
    assert "Traceback (most recent call last):" in log
    assert "in breaks" in log
    assert "one failed at work: ZeroDivisionError" in summary(report, ("work",), dry=False)
    assert not (tmp_path / "etc").exists(), "no lease is left"


def test_one_on_the_head_holds_nobody_up_who_waits_for_it(ssh: Ssh, tmp_path: Path) -> None:
    class Waits(Work):
        async def run(self, setup: Setup, runner: HostRunner) -> None:
            if runner.host.name == "two":
                await setup.head.wait("never reached", self.name)
            await super().run(setup, runner)

    report = set_up(ssh, tmp_path, Waits(tmp_path, {"head": breaks}), goes_on_after("head", tmp_path))
    assert [host.name for host in report.failed] == ["head", "two"]
    assert report.hosts["two"].failure is not None
    assert "the head node head failed at work: ZeroDivisionError" in report.hosts["two"].failure.message
    assert (tmp_path / "one").exists()


def test_one_at_the_end_is_a_failure_too(ssh: Ssh, tmp_path: Path) -> None:
    class Ends(Work):
        async def finish(self, setup: Setup) -> None:
            await breaks(setup)

    (tmp_path / "go").touch()
    report = set_up(ssh, tmp_path, Ends(tmp_path, {}))
    assert [host.name for host in report.failed] == ["head"]
    assert "Traceback" in Path(report.hosts["head"].log).read_text()


def test_a_key_that_is_missing_ends_the_run_before_anything_is_changed(ssh: Ssh, tmp_path: Path) -> None:
    stage = Work(tmp_path, {})

    async def missing(host: Host) -> None:
        if host.name == "two":
            raise UserError("no such key file")

    with pytest.raises(UserError, match="no such key file") as caught:
        set_up(ssh, tmp_path, stage, connected=missing)
    assert caught.value.exit_code == 2
    assert not stage.working.is_set()
    assert not (tmp_path / "etc").exists()


class Install:
    """A command that goes on until `go` is there."""

    name = "install"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plan(self, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
        if (self.folder / "installed").exists():
            return ()
        wait = f"while [ ! -e {self.folder}/go ]; do sleep 0.05; done"
        script = f": >{self.folder}/begun\n{wait}\n: >{self.folder}/installed"
        return (Action("install", script),)


def test_it_ends_one_host_while_others_are_in_the_middle(
    ssh: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STEPS", (Install(tmp_path),))

    async def missing(host: Host) -> None:
        while host.name == "two":
            if (tmp_path / "begun").exists():
                raise UserError("no such key file")
            await asyncio.sleep(0.02)

    report = set_up(ssh, tmp_path, Work(tmp_path, {}), goes_on_after("two", tmp_path), connected=missing)
    assert [host.name for host in report.failed] == ["two"]
    assert report.exit_code == 3
    assert report.hosts["two"].failure is not None
    assert report.hosts["two"].failure.message == "no such key file"
    assert (tmp_path / "one").exists()


def test_a_lost_lease_stops_all_hosts_and_says_where_they_are(
    ssh: Ssh, tmp_path: Path, node_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease.__init__, "__defaults__", (0.05, 100.0))

    async def stolen(_: Setup) -> None:
        (node_folder / "lab" / "lease").write_bytes(THERE.content())
        await asyncio.sleep(60)

    report = set_up(ssh, tmp_path, Work(tmp_path, {"one": stolen}, first=2))
    assert report.exit_code == 1
    assert [host.name for host in report.failed] == ["head", "one", "two"]
    for host in report.failed:
        assert host.failure is not None
        assert host.failure.step == "work"
        assert "stopped in the middle: the lease on " in host.failure.message
        assert "bob@desk (process 22)" in host.failure.message
        assert "FAILED at work: stopped in the middle" in Path(host.log).read_text()
    assert "stopped: the lease on " in summary(report, ("work",), dry=False)
    assert (node_folder / "lab" / "lease").read_bytes() == THERE.content(), "theirs is left alone"
    assert not (tmp_path / "head").exists()


def test_a_host_that_takes_long_to_let_us_in_does_not_end_the_look_at_the_others(
    ssh: Ssh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "LOOK_SECONDS", 0.5)
    with tarpit() as port:
        hosts = (ssh.servers().host("head"), Host(name="slow", address="127.0.0.1", port=port))
        selection = Selection(
            Cluster(name="lab", hosts=hosts), ssh.options(username="root", connect_timeout=30.0), hosts
        )
        watch = status.Watch(selection, RunSelector(user="ann"), ssh.folder)

        async def look() -> None:
            await watch._connect()
            await asyncio.gather(*(session.close() for session in watch.sessions.values()))

        asyncio.run(look())
    assert list(watch.sessions) == ["head"]
    assert watch._silent["slow"].message == "no connection within 0.5 s"
