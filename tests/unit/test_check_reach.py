"""Reachability with real sockets: every host is an address of 127.0.0.0/8 of its own."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from localsession import LocalSession
from realparts import require

from clusterkit.common.finding import Finding, Level
from clusterkit.provision.checks import reach
from clusterkit.provision.checks.reach import reachable
from clusterkit.provision.ray.ports import Ports

ADDRESSES = {"h1": "127.0.71.1", "h2": "127.0.71.2", "h3": "127.0.71.3"}


def probe(addresses: dict[str, str] = ADDRESSES, **environments: dict[str, str]) -> list[Finding]:
    sessions = [LocalSession(name, environment=environments.get(name)) for name in addresses]
    return asyncio.run(reachable(sessions, addresses, "h1"))


def listens(address: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((address, port)) == 0


def test_hosts_that_reach_one_another() -> None:
    findings = probe()

    assert [(finding.host, finding.level) for finding in findings] == [(name, Level.OK) for name in ADDRESSES]
    assert "reaches h2, h3" in findings[0].message


@pytest.mark.parametrize("language", ["python", "perl"])
def test_a_connection_is_reset_only_after_the_other_end_has_closed(language: str) -> None:
    perl = shutil.which("perl")
    require(perl is not None, "no perl here")
    words = [sys.executable, "-c", reach._PYTHON] if language == "python" else [str(perl), "-e", reach._PERL]
    command = [*words, "127.0.71.4", "60", str(Ports().first_worker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == f"bound {Ports().first_worker}\n"
        connect = partial(socket.create_connection, ("127.0.71.4", Ports().first_worker))
        held, last = connect(), connect()
        with suppress(OSError):
            last.shutdown(socket.SHUT_WR)
            last.recv(1)
        # The last was accepted after the other, and is reset now.
        assert not select.select([held], [], [], 0)[0]
        many = [connect() for _ in range(300)]  # more than are kept
        with pytest.raises(ConnectionResetError):
            held.recv(1)
        for connection in (held, last, *many):
            connection.close()
        listener.kill()


def test_nothing_listens_afterwards() -> None:
    probe()

    ports = (Ports().gcs, *Ports().on_every_node().values(), Ports().first_worker)
    assert not any(listens(address, port) for address in ADDRESSES.values() for port in ports)
    # Not even a port in TIME_WAIT, which would keep a server that does not reuse addresses from starting.
    for port in ports:
        with socket.socket() as sock:
            sock.bind((ADDRESSES["h2"], port))


def test_an_address_that_is_not_the_hosts_own() -> None:
    findings = probe({**ADDRESSES, "h3": "198.51.100.9"})

    assert [(finding.host, finding.level) for finding in findings if finding.level is not Level.OK] == [
        ("h3", Level.FAIL)
    ]
    wrong = next(finding for finding in findings if finding.level is Level.FAIL)
    assert "198.51.100.9 is on none of its interfaces" in wrong.message
    assert "private_address" in wrong.fix


def test_a_port_in_use_is_left_alone() -> None:
    with socket.create_server((ADDRESSES["h2"], Ports().node_manager)) as busy:
        findings = probe()

        assert listens(ADDRESSES["h2"], Ports().node_manager)
        assert busy.fileno() > 0
    assert {finding.level for finding in findings} == {Level.OK}


def test_a_firewall_between_two_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A stand-in for the firewall: bash of h1 hangs (dropped) or is refused where it opens these connections.
    monkeypatch.setattr(reach, "CONNECT_SECONDS", 1)
    node, worker = Ports().node_manager, Ports().first_worker
    stand_in = tmp_path / "bash"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$4 $5" in "{ADDRESSES["h2"]} {node}") exec sleep 30 ;; "{ADDRESSES["h3"]} {worker}") '
        f'echo "bash: connect: Connection refused" >&2; exit 1 ;; esac\nexec {shutil.which("bash")} "$@"\n'
    )
    stand_in.chmod(0o755)

    findings = probe(h1={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    failures = [finding for finding in findings if finding.level is Level.FAIL]
    assert [finding.host for finding in failures] == ["h1", "h1"]
    assert f"cannot reach h2 at {ADDRESSES['h2']} on ports {node}: no answer" in failures[0].message
    assert f"ports {worker}: Connection refused" in failures[1].message
    assert "Open these TCP ports from h1 to h2" in failures[0].fix


@pytest.mark.parametrize("has", ["perl", "nothing"])
def test_a_host_without_python(tmp_path: Path, has: str) -> None:
    require(shutil.which("perl") is not None, "no perl here")
    for tool in ("sh", "timeout", "bash", "kill", *(["perl"] if has == "perl" else [])):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "/bin/true")

    findings = probe(h2={"PATH": str(tmp_path)})

    assert not [finding for finding in findings if finding.level is Level.FAIL]
    unchecked = [finding for finding in findings if finding.level is Level.WARN]
    assert [finding.host for finding in unchecked] == ([] if has == "perl" else ["h2"])
    if has == "perl":
        assert "reaches h2, h3" in findings[0].message
    else:
        assert "no python3, no perl" in unchecked[0].message


def test_one_host_has_nobody_to_reach() -> None:
    assert probe({"h1": "127.0.71.1"}) == []
