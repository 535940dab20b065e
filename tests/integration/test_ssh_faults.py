"""Hosts that are down, silent, overloaded or die: each gives its own error, in time, with what to do next."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import pytest
from sshd import Ssh, free_port, tarpit

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.connection import connect

pytest_plugins = ["sshd_fixture"]


def test_port_that_nobody_listens_on(ssh: Ssh) -> None:
    port = free_port()
    error = ssh.failure(Host(name="a", address="127.0.0.1", port=port))
    assert error.kind is ErrorKind.UNREACHABLE
    assert str(port) in error.message
    assert "refused" in error.message.lower()
    assert "firewall" in error.fix


def test_name_that_nobody_knows(ssh: Ssh) -> None:
    error = ssh.failure(Host(name="no-such-host.invalid"))
    assert error.kind is ErrorKind.UNREACHABLE
    assert "no-such-host.invalid is not known" in error.message


def test_address_that_does_not_answer(ssh: Ssh) -> None:
    """The kernel drops what comes for a listener whose queue is full, as a firewall would."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        host = Host(name="a", address="127.0.0.1", port=listener.getsockname()[1])
        error = ssh.failure(host, ssh.options(connect_timeout=0.5))
        for sock in waiting:
            sock.close()
    assert error.kind is ErrorKind.UNREACHABLE
    assert "no answer" in error.message
    assert "0.5 s" in error.message


def test_host_that_takes_connections_and_never_answers(ssh: Ssh) -> None:
    with tarpit() as port:
        before = time.monotonic()
        error = ssh.failure(Host(name="a", address="127.0.0.1", port=port), ssh.options(connect_timeout=0.5))
        assert time.monotonic() - before < 5
    assert error.kind is ErrorKind.SILENT
    assert "0.5 s" in error.message
    assert "--connect-timeout 2" in error.fix


def test_server_that_hangs_in_the_middle_of_the_login(ssh: Ssh) -> None:
    server = ssh.servers()
    server._process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
    try:
        error = ssh.failure(server, ssh.options(connect_timeout=0.5))
    finally:
        server._process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
    assert error.kind is ErrorKind.SILENT


def test_server_that_drops_every_connection(ssh: Ssh) -> None:
    with tarpit(closes=True) as port:
        error = ssh.failure(Host(name="a", address="127.0.0.1", port=port))
    assert error.kind is ErrorKind.UNREACHABLE
    assert "MaxStartups" in error.fix


def test_server_that_is_too_busy_at_first_is_tried_again(ssh: Ssh) -> None:
    """MaxStartups lets one connection log in at a time and drops the others."""
    server = ssh.servers("MaxStartups 1:100:1")

    async def scenario() -> int:
        sessions = await asyncio.gather(*(connect(server.host(), ssh.options()) for _ in range(4)))
        await asyncio.gather(*(session.close() for session in sessions))
        return len(sessions)

    assert asyncio.run(scenario()) == 4


def test_one_bad_host_does_not_hold_the_others_up(ssh: Ssh) -> None:
    servers = [ssh.servers() for _ in range(3)]

    async def scenario(port: int) -> list[str | ErrorKind]:
        hosts = [*(server.host() for server in servers), Host(name="bad", address="127.0.0.1", port=port)]
        options = ssh.options(connect_timeout=1.0)

        async def one(host: Host) -> str | ErrorKind:
            try:
                async with ssh.session(host, options) as session:
                    return (await session.run("echo ok")).stdout.strip()
            except HostError as error:
                return error.kind

        return list(await asyncio.gather(*map(one, hosts)))

    with tarpit() as port:
        assert asyncio.run(scenario(port)) == ["ok", "ok", "ok", ErrorKind.SILENT]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_host_that_dies_in_the_middle(ssh: Ssh, how: signal.Signals) -> None:
    """Killed: the connection ends at once. Stopped, as behind a pulled cable: only keepalives notice."""
    server = ssh.servers()

    async def work(session):  # type: ignore[no-untyped-def]
        def on_output(line: str) -> None:
            server.kill_connections(how)

        before = time.monotonic()
        with pytest.raises(HostError) as caught:
            await session.run("echo going; sleep 300", timeout=60, on_output=on_output)
        took = time.monotonic() - before
        with pytest.raises(HostError) as later:
            await session.run("true")
        return caught.value, later.value, took

    error, later, took = ssh.with_session(server, work, ssh.options(keepalive=0.3))
    assert error.kind is ErrorKind.LOST
    assert "run the same command again" in error.fix
    assert later.kind is ErrorKind.LOST
    assert took < 10


def test_default_keepalive_notices_within_twenty_seconds(ssh: Ssh) -> None:
    options = ssh.options()
    assert 10 <= options.keepalive * 4 <= 20


def test_busy_host_is_not_taken_for_a_dead_one(ssh: Ssh) -> None:
    """Keepalives are answered by sshd while a silent command runs."""

    async def work(session):  # type: ignore[no-untyped-def]
        return await session.run("sleep 2; echo ok")

    assert ssh.with_session(ssh.servers(), work, ssh.options(keepalive=0.2)).stdout == "ok\n"


def test_secrets_and_scripts_stay_out_of_errors(ssh: Ssh) -> None:
    async def work(session):  # type: ignore[no-untyped-def]
        await session.run("token=hollyhock; sleep 300", stdin=b"peony", timeout=0.5)

    with pytest.raises(HostError) as caught:
        ssh.with_session(ssh.servers(), work)
    assert "hollyhock" not in str(caught.value)
    assert "peony" not in str(caught.value)
