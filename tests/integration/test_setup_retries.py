"""Hosts that cannot be reached for a while or are lost in the middle, with real SSH servers: tried again, and who
failed is remembered. The steps that would change this machine are left out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sshd import Ssh, free_port, tarpit

from clusterkit.cli import main as cli
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.checks.needs import Needs
from clusterkit.provision.steps.step import DesiredState
from clusterkit.setup import setup as module
from clusterkit.setup.command import failed_hosts, nothing_failed, only_failed, path_of, save_failed, save_inventory
from clusterkit.setup.model import HostReport, Report, State, StepFailedError
from clusterkit.setup.runner import HostRunner
from clusterkit.setup.setup import Request, Setup, Stage
from clusterkit.setup.view import summary
from clusterkit.ssh.api import ErrorKind, Session
from clusterkit.ssh.connection import connect
from clusterkit.ssh.selection import Selection
from trainer.errors import UserError

pytest_plugins = ["sshd_fixture"]


@pytest.fixture(autouse=True)
def only_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No step changes this machine, nobody minds what it is or that all servers are one machine."""
    monkeypatch.setattr(module, "STEPS", ())
    for judge in ("judge_host", "judge_gpus"):
        monkeypatch.setattr(module, judge, lambda *_: ())
    monkeypatch.setattr(module, "judge_cluster", lambda *_: ())
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))


@dataclass
class Touch(Stage):
    """Appends a line to a file on every host. before: called with the host's name ahead of it."""

    folder: Path
    before: Callable[[str], None] = lambda _: None
    name: str = "touch"
    seen: list[str] = field(default_factory=list)

    async def run(self, setup: Setup, runner: HostRunner) -> None:
        session = runner.session
        assert session is not None
        async with runner.timed(self.name):
            self.before(runner.host.name)
            await session.run(f"echo done >>{self.folder}/{runner.host.name}", timeout=30.0)
            self.seen.append(runner.host.name)
            runner.show(self.name, State.OK)


def run(ssh: Ssh, hosts: list[Host], stage: Stage, tmp_path: Path, *, retries: int, wait: float = 0.2) -> Report:
    """A whole set-up of these hosts; the first is the head."""
    cluster = Cluster(hosts=tuple(hosts))
    logs = tmp_path / "logs"
    logs.mkdir(exist_ok=True)
    request = Request(
        cluster, cluster.hosts, DesiredState(cluster), Needs(), logs, stages=(stage,), retries=retries, retry_wait=wait
    )

    async def connected(host: Host) -> Session:
        return await connect(host, ssh.options(connect_timeout=30.0, username="root"))

    async def scenario() -> Report:
        return await Setup(request, connected, lambda _: None).run()

    return asyncio.run(scenario())


def test_a_host_that_comes_up_later_gets_through_and_holds_nobody_up(ssh: Ssh, tmp_path: Path) -> None:
    early, late = ssh.servers(), ssh.servers()
    late.stop()

    def before(name: str) -> None:
        if name == "early":
            late.start()  # not before the other is through with all but this

    report = run(ssh, [early.host("early"), late.host("late")], Touch(tmp_path, before), tmp_path, retries=6)
    assert report.exit_code == 0, report.as_dict()
    assert report.hosts["early"].retries == 0
    assert report.hosts["late"].retries >= 1
    assert (tmp_path / "late").read_text() == "done\n"
    said = [note for note in report.notes if note.startswith("late: tried again (1 of 6) after connect:")]
    assert said
    assert "again in 0.2 s (1 of 6)" in Path(report.hosts["late"].log).read_text()


def test_a_host_that_is_lost_in_the_middle_goes_through_again(ssh: Ssh, tmp_path: Path) -> None:
    steady, frail = ssh.servers(), ssh.servers()
    blows = []

    def before(name: str) -> None:
        if name == "frail" and not blows:
            blows.append(name)
            frail.kill_connections()

    stage = Touch(tmp_path, before)
    report = run(ssh, [steady.host("steady"), frail.host("frail")], stage, tmp_path, retries=1)
    assert report.exit_code == 0, report.as_dict()
    assert sorted(stage.seen) == ["frail", "steady"]
    assert report.hosts["frail"].retries == 1
    assert report.as_dict()["hosts"][1]["retries"] == 1

    blows.clear()
    report = run(ssh, [steady.host("steady"), frail.host("frail")], stage, tmp_path, retries=0)
    assert report.exit_code == 3
    failure = report.hosts["frail"].failure
    assert failure is not None
    assert (failure.step, failure.kind, failure.transient) == ("touch", ErrorKind.LOST, True)


def test_what_stays_away_fails_after_the_last_try_and_another_reason_at_once(ssh: Ssh, tmp_path: Path) -> None:
    with tarpit() as port:
        server = ssh.servers()
        hosts = [
            server.host("head"),
            Host(name="gone", address="127.0.0.1", port=free_port()),
            Host(name="mute", address="127.0.0.1", port=port),
            server.host("stranger", username="nobody-of-that-name"),
        ]
        report = run(ssh, hosts, Touch(tmp_path), tmp_path, retries=2, wait=0.05)
    assert [report.hosts[name].retries for name in ("head", "gone", "mute", "stranger")] == [0, 2, 2, 0]
    assert [host.name for host in report.failed] == ["gone", "mute", "stranger"]
    assert "gone failed at connect (after 2 further tries):" in summary(report, ("connect",), dry=False)


def test_waits_grow_and_end_at_a_minute(ssh: Ssh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.1)
    host = Host(name="gone", address="127.0.0.1", port=free_port())
    report = run(ssh, [host], Touch(tmp_path), tmp_path, retries=4, wait=0.04)
    log = Path(report.hosts["gone"].log).read_text()
    for number, wait in enumerate(("0.04", "0.08", "0.1", "0.1"), 1):
        assert f"again in {wait} s ({number} of 4)" in log


CLUSTER = Cluster(name="lab", hosts=tuple(Host(name=name) for name in "abcd"))


def ended(**failures: bool) -> Report:
    report = Report({name: HostReport(name) for name in failures})
    for name, failed in failures.items():
        if failed:
            report.hosts[name].failure = StepFailedError("docker", "broken")
    return report


def chosen(cluster: Cluster, names: str) -> Selection:
    hosts = tuple(host for host in cluster.hosts if host.name in names)
    return Selection(cluster, ssh=None, hosts=hosts)  # type: ignore[arg-type] # nothing is connected to


def test_who_failed_is_kept_and_a_part_of_the_cluster_changes_its_own_part_only() -> None:
    assert failed_hosts(CLUSTER) == ()
    save_failed(CLUSTER, ended(a=True, b=True, c=False, d=True))
    assert failed_hosts(CLUSTER) == ("a", "b", "d")
    assert path_of("lab").stat().st_mode & 0o077 == 0

    save_failed(CLUSTER, ended(b=False, c=True))  # --limit b c
    assert failed_hosts(CLUSTER) == ("a", "c", "d")
    smaller = Cluster(name="lab", hosts=CLUSTER.hosts[:3])
    assert failed_hosts(smaller) == ("a", "c")
    save_failed(CLUSTER, ended(a=False, b=False, c=False, d=False))
    assert failed_hosts(CLUSTER) == ()


def test_retry_is_the_failed_ones_of_those_selected() -> None:
    with pytest.raises(UserError, match="cluster lab has had no set-up from this machine yet: leave --retry out"):
        only_failed(chosen(CLUSTER, "abcd"))
    save_failed(CLUSTER, ended(a=False, b=False, c=False, d=False))
    assert only_failed(chosen(CLUSTER, "abcd")) is None
    outcome = nothing_failed(CLUSTER)
    assert outcome.exit_code == 0
    assert "nothing failed in the last set-up of cluster lab" in outcome.text
    assert outcome.as_dict()["hosts"] == []

    save_failed(CLUSTER, ended(a=False, b=True, c=True, d=False))
    found = only_failed(chosen(CLUSTER, "abcd"))
    assert found is not None
    assert [host.name for host in found.hosts] == ["b", "c"]
    found = only_failed(chosen(CLUSTER, "cd"))
    assert found is not None
    assert [host.name for host in found.hosts] == ["c"]
    with pytest.raises(UserError, match="b, c failed last time, and --limit and --exclude leave none of them"):
        only_failed(chosen(CLUSTER, "ad"))
    path_of("lab").write_text("{")
    assert failed_hosts(CLUSTER) == ()


def test_the_command_remembers_who_failed(
    ssh: Ssh, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that nobody answers at: nothing is changed anywhere, and the next run with --retry is for them."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["clusterkit", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return code or 0, capsys.readouterr().out

    gone = ["127.0.0.2", "127.0.0.3"]
    words = [
        "setup",
        "--hostnames",
        *(f"{address}:{free_port(address)}" for address in gone),
        "--private-key-file",
        str(ssh.key),
        "--connect-timeout",
        "2",
    ]
    assert call(*words, "--retry")[0] == 2
    code, said = call(*words)
    assert code == 1
    # Nobody let us in, so the cluster is not kept: without its hosts no command finds it.
    assert "--retry" not in said
    save_inventory(Cluster(hosts=tuple(Host(name=name, port=free_port(name)) for name in gone)))
    assert "clusterkit setup --retry" in call(*words)[1]
    assert sorted(json.loads(path_of("default").read_text())["failed"]) == sorted(gone)
    code, said = call(*words, "--retry", "--exclude", gone[0], "--json")
    assert (code, json.loads(said)["failed"]) == (1, gone[1:])
