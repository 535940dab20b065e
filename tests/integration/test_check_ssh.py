"""Facts and `clusterkit check` over real SSH servers, as root and through sudo."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from sshd import Ssh, Sshd, account, tarpit

from clusterkit.cli import main as cli
from clusterkit.hosts.model import Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.facts.probe import ProbeRequest, gather
from clusterkit.ssh.secrets import SUDO_PASSWORD

pytest_plugins = ["sshd_fixture"]


def facts_of(ssh: Ssh, server: Sshd, username: str = "root") -> Facts:
    options = ssh.options(username=username)
    return ssh.with_session(server, lambda session: gather(session, ProbeRequest(head_address="127.0.0.1")), options)


def test_root_is_asked_once(ssh: Ssh) -> None:
    facts = facts_of(ssh, ssh.servers())

    assert (facts.sudo, facts.uid) == ("root", 0)
    assert facts.hostname == os.uname().nodename
    assert abs(facts.clock_offset) <= facts.clock_error + 0.01
    assert facts.route_to_head in {"127.0.0.1", ""}
    assert facts.ssh_address == "127.0.0.1"


@pytest.mark.parametrize("way", ["nopasswd", "password"])
def test_sudo_is_used_where_it_is_allowed(ssh: Ssh, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    with account(sudo=way) as user:
        monkeypatch.setenv(SUDO_PASSWORD, user.password)

        facts = facts_of(ssh, ssh.servers(), user.name)

    assert (facts.sudo, facts.uid) == (way, 0)
    assert facts.hostname == os.uname().nodename
    assert facts.ssh_address == "127.0.0.1"  # sudo forgets the connection, the login does not


def test_a_wrong_sudo_password_leaves_what_everybody_may_see(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    with account(sudo="password") as user:
        monkeypatch.setenv(SUDO_PASSWORD, "wrong")

        facts = facts_of(ssh, ssh.servers(), user.name)

    assert facts.sudo == "none"
    assert facts.uid > 0
    assert "password" in facts.extra["sudo_error"]
    assert facts.extra["sudo_fix"]
    assert facts.memory > 0


def test_no_sudo_at_all(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    with account() as user:
        monkeypatch.setenv(SUDO_PASSWORD, user.password)

        facts = facts_of(ssh, ssh.servers(), user.name)

    assert facts.sudo == "none"
    assert user.name in facts.extra["sudo_error"] or "sudo" in facts.extra["sudo_error"]


def test_one_sound_host(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_check(ssh, capsys, ssh.servers(), "--no-probes")

    assert code == 0
    assert "1 host(s): 1 " in out
    assert "FAIL" not in out
    next_command = next(line for line in out.splitlines() if "make them a cluster" in line)
    assert "  clusterkit setup --hostnames 127.0.0.1" in next_command
    assert "--no-probes" not in next_command


def test_a_dead_host_holds_nobody_up(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    with tarpit() as silent:
        hosts = [ssh.servers().host(), Host(name="127.0.0.1:1"), Host(name=f"127.0.0.1:{silent}")]
        code, out = run_check(ssh, capsys, *hosts, "--connect-timeout", "2", "--json")

    report = json.loads(out)
    assert code == report["exit_code"] == 3
    assert [host["verdict"] == "unreachable" for host in report["hosts"].values()] == [False, True, True]
    dead = report["hosts"]["127.0.0.1:1"]["findings"][0]
    assert (dead["check"], dead["level"]) == ("connection", "fail")
    assert dead["fix"]
    assert report["seconds"] < 15
    assert report["hosts"][hosts[0].name]["facts"]["hostname"] == os.uname().nodename


def test_no_host_answers(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_check(ssh, capsys, Host(name="127.0.0.1:1"))

    assert code == 1
    assert "unreachable" in out


def test_fewer_hosts_than_the_preset_needs(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_check(ssh, capsys, ssh.servers(), "--preset", "1.5B_n4")

    assert code == 1
    assert "preset 1.5B_n4 needs 4 hosts; 1 can be worked with" in out


def test_bad_usage_asks_no_host(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    server = ssh.servers()

    for arguments in (["--preset", "huge"], ["--hostnames=-oProxyCommand=x"], ["--limit", "nobody"]):
        code, out = run_check(ssh, capsys, server, *arguments)
        assert (code, out) == (2, "")
    assert "Accepted" not in server.log()


def test_a_machine_named_twice(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run_check(ssh, capsys, ssh.servers(), ssh.servers())

    assert code == 1
    assert "one machine under two names" in out


def test_storage_is_tried_and_left_as_it_was(ssh: Ssh, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("untouched")
    hosts = [ssh.servers(), ssh.servers()]

    _, out = run_check(ssh, capsys, *hosts, storage=tmp_path)
    _, without = run_check(ssh, capsys, *hosts, "--no-probes", storage=tmp_path)

    assert f"{tmp_path} is one folder on 2 host(s)" in out
    assert "is one folder" not in without
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_bandwidth(ssh: Ssh, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out = run_check(ssh, capsys, ssh.servers(), "--bandwidth", storage=tmp_path)

    assert code == 0
    assert f"GB/s to {tmp_path}" in out
    assert list(tmp_path.iterdir()) == []


def test_nccl_says_why_it_cannot_run(ssh: Ssh, capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run_check(ssh, capsys, ssh.servers(), "--nccl")

    assert "not run: one host alone has nobody to talk to" in out


def run_check(
    ssh: Ssh, capsys: pytest.CaptureFixture[str], *words: Sshd | Host | str, storage: Path | None = None
) -> tuple[int, str]:
    """Exit code of `clusterkit check` on these hosts, and what it printed: all that where it succeeded, else stdout."""
    hosts = [word.host() if isinstance(word, Sshd) else word for word in words if not isinstance(word, str)]
    options = [word for word in words if isinstance(word, str)]
    folder = storage or ssh.folder / "storage"
    argv: list[Any] = ["clusterkit", "check", "--hostnames", *(host.name for host in hosts), "--username", "root"]
    argv += ["--private-key-file", str(ssh.key), "--storage", str(folder), *options]
    before, sys.argv = sys.argv, argv
    try:
        cli.main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv = before
    shown = capsys.readouterr()
    return code, shown.out if code or "--json" in options else shown.out + shown.err
