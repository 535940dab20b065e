"""Hosts behind one bastion, several, or one that fails; all of them real SSH servers."""

from __future__ import annotations

import asyncio

import pytest
from sshd import Ssh, Sshd, free_port, make_key, wait_until

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import ErrorKind, HostError
from clusterkit.ssh.connection import connect
from trainer.errors import UserError

pytest_plugins = ["sshd_fixture"]


def jump(server: Sshd) -> str:
    return f"root@{server.address}:{server.port}"


async def where_from(session):  # type: ignore[no-untyped-def]
    return (await session.run("echo ${SSH_CONNECTION%% *}")).stdout.strip()


def test_hosts_share_one_connection_to_their_bastion(ssh: Ssh) -> None:
    bastion, hosts = ssh.servers(), [ssh.servers() for _ in range(4)]

    async def scenario() -> list[str]:
        options = ssh.options(proxy_jump=jump(bastion))
        sessions = await asyncio.gather(*(connect(server.host(), options) for server in hosts))
        said = [await where_from(session) for session in sessions]
        await asyncio.gather(*(session.close() for session in sessions))
        return said

    assert asyncio.run(scenario()) == ["127.0.0.1"] * 4
    assert bastion.log().count("Accepted publickey") == 1
    assert wait_until(lambda: not bastion.children())  # closed with the last session
    assert all(server.log().count("Accepted publickey") == 1 for server in hosts)


def test_chain_of_two(ssh: Ssh) -> None:
    first, second, server = ssh.servers(), ssh.servers(), ssh.servers()
    host = server.host(proxy_jump=f"{jump(first)},{jump(second)}")
    assert ssh.with_session(host, where_from) == "127.0.0.1"
    for bastion in (first, second):
        assert bastion.log().count("Accepted publickey") == 1


def test_proxy_jump_of_the_ssh_configuration(ssh: Ssh) -> None:
    bastion, server = ssh.servers(), ssh.servers()
    (ssh.home / ".ssh" / "config").write_text(
        f"Host gate\n  HostName 127.0.0.1\n  Port {bastion.port}\n  User root\n"
        f"Host inner\n  HostName 127.0.0.1\n  Port {server.port}\n  User root\n  ProxyJump gate\n"
    )
    assert ssh.with_session(Host(name="inner"), where_from) == "127.0.0.1"
    assert bastion.log().count("Accepted publickey") == 1


def test_host_keys_of_the_bastion_are_checked_too(ssh: Ssh) -> None:
    bastion, server = ssh.servers(), ssh.servers()
    host = server.host(proxy_jump=jump(bastion))
    assert ssh.failure(host, ssh.options(host_key_policy="strict")).kind is ErrorKind.HOST_KEY
    ssh.with_session(host, where_from)
    bastion.stop()
    bastion.host_key = make_key(ssh.folder / "swapped")
    bastion.start()
    error = ssh.failure(host)
    assert error.kind is ErrorKind.HOST_KEY
    assert error.host == host.name
    assert "bastion" in error.message
    assert f"[127.0.0.1]:{bastion.port}" in error.fix


def test_bastion_that_is_down_fails_every_host_behind_it(ssh: Ssh) -> None:
    port = free_port()

    async def scenario() -> list[HostError]:
        options = ssh.options(proxy_jump=f"root@127.0.0.1:{port}")
        hosts = [Host(name=name, address="127.0.0.1") for name in ("a", "b")]
        errors = await asyncio.gather(*(connect(host, options) for host in hosts), return_exceptions=True)
        return [error for error in errors if isinstance(error, HostError)]

    errors = asyncio.run(scenario())
    assert [(error.host, error.kind) for error in errors] == [
        ("a", ErrorKind.UNREACHABLE),
        ("b", ErrorKind.UNREACHABLE),
    ]


def test_host_that_the_bastion_cannot_reach(ssh: Ssh) -> None:
    host = Host(name="a", address="127.0.0.1", port=free_port(), proxy_jump=jump(ssh.servers()))
    error = ssh.failure(host)
    assert error.kind is ErrorKind.UNREACHABLE
    assert "bastion" in error.message
    assert "refused" in error.message.lower()


def test_bastion_that_forbids_forwarding(ssh: Ssh) -> None:
    bastion = ssh.servers("AllowTcpForwarding no")
    error = ssh.failure(ssh.servers().host(proxy_jump=jump(bastion)))
    assert error.kind is ErrorKind.UNREACHABLE
    assert "AllowTcpForwarding" in error.fix


def test_bastion_that_dies_takes_its_hosts_and_is_opened_anew(ssh: Ssh) -> None:
    bastion, server = ssh.servers(), ssh.servers()

    async def scenario() -> ErrorKind:
        options = ssh.options(proxy_jump=jump(bastion))
        session = await connect(server.host(), options)
        bastion.kill_connections()
        with pytest.raises(HostError) as caught:
            await session.run("sleep 300", timeout=30)
        again = await connect(server.host(), options)
        assert (await again.run("true")).ok
        await again.close()
        await session.close()
        return caught.value.kind

    assert asyncio.run(scenario()) is ErrorKind.LOST


def test_bastions_that_lead_in_a_circle(ssh: Ssh) -> None:
    (ssh.home / ".ssh" / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    with pytest.raises(UserError, match="circle"):
        ssh.with_session(Host(name="a"), where_from)
