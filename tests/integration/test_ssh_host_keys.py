"""Host keys: learned once, refused when they change, under every policy and behind bastions too."""

from __future__ import annotations

import asyncio
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from sshd import Ssh, Sshd, fingerprint_of, make_key

from clusterkit.ssh.api import ErrorKind

pytest_plugins = ["sshd_fixture"]


async def hello(session) -> str:  # type: ignore[no-untyped-def]
    return (await session.run("echo hello")).stdout.strip()


def swap_host_key(ssh: Ssh, server: Sshd, kind: str = "ed25519") -> Path:
    """The host was set up anew, or somebody is in between."""
    server.stop()
    server.host_key = make_key(ssh.folder / f"swapped_{kind}", kind)
    server.start()
    return server.host_key


def test_first_key_is_kept_for_the_owner_alone(ssh: Ssh) -> None:
    server = ssh.servers()
    for _ in range(2):
        assert ssh.with_session(server, hello) == "hello"
    lines = ssh.known_hosts.read_text().splitlines()
    public = ssh.servers.host_key.with_suffix(".pub").read_text().split()
    assert lines == [f"[127.0.0.1]:{server.port} {public[0]} {public[1]}"]
    assert stat.S_IMODE(ssh.known_hosts.stat().st_mode) == 0o600
    found = subprocess.run(
        ["ssh-keygen", "-F", f"[127.0.0.1]:{server.port}", "-f", ssh.known_hosts], capture_output=True, check=False
    )
    assert found.returncode == 0  # OpenSSH reads what we write


@pytest.mark.parametrize("policy", ["accept-new", "strict"])
@pytest.mark.parametrize("kind", ["ed25519", "rsa"])
def test_changed_key_is_refused_until_it_is_forgotten(ssh: Ssh, policy: str, kind: str) -> None:
    server = ssh.servers()
    ssh.with_session(server, hello)
    new = swap_host_key(ssh, server, kind)
    error = ssh.failure(server, ssh.options(host_key_policy=policy))
    assert error.kind is ErrorKind.HOST_KEY
    assert fingerprint_of(new) in error.message
    assert fingerprint_of(ssh.servers.host_key) in error.message
    way_out = next(line for line in error.fix.splitlines() if line.startswith("ssh-keygen -R"))
    assert str(ssh.known_hosts) in way_out
    subprocess.run(shlex.split(way_out), check=True, capture_output=True)
    assert ssh.with_session(server, hello) == "hello"


def test_key_in_the_users_own_file_is_trusted_and_its_change_refused(ssh: Ssh) -> None:
    server = ssh.servers()
    public = " ".join(ssh.servers.host_key.with_suffix(".pub").read_text().split()[:2])
    users = ssh.home / ".ssh" / "known_hosts"
    users.write_text(f"this line is broken\n[127.0.0.1]:{server.port} {public}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", users], check=False, capture_output=True)  # hashed, as Debian does
    before = users.read_text()
    assert ssh.with_session(server, hello, ssh.options(host_key_policy="strict")) == "hello"
    assert not ssh.known_hosts.exists()
    swap_host_key(ssh, server)
    error = ssh.failure(server)
    assert error.kind is ErrorKind.HOST_KEY
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {users}" in error.fix
    assert users.read_text() == before


def test_known_key_is_asked_for_where_the_host_has_several(ssh: Ssh) -> None:
    rsa = make_key(ssh.folder / "host_rsa", "rsa")
    server = ssh.servers(f"HostKey {rsa}")
    public = " ".join(rsa.with_suffix(".pub").read_text().split()[:2])
    (ssh.home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {public}\n")
    assert ssh.with_session(server, hello, ssh.options(host_key_policy="strict")) == "hello"


def test_strict_refuses_a_stranger_with_its_fingerprint(ssh: Ssh) -> None:
    server = ssh.servers()
    error = ssh.failure(server, ssh.options(host_key_policy="strict"))
    assert error.kind is ErrorKind.HOST_KEY
    assert fingerprint_of(ssh.servers.host_key) in error.message
    assert f"ssh-keyscan -p {server.port} 127.0.0.1 >> {ssh.known_hosts}" in error.fix
    assert not ssh.known_hosts.exists()


def test_pinned_key(ssh: Ssh) -> None:
    server = ssh.servers()
    right = fingerprint_of(ssh.servers.host_key)
    assert ssh.with_session(server.host(host_key=right), hello, ssh.options(host_key_policy="strict")) == "hello"
    wrong = fingerprint_of(make_key(ssh.folder / "other"))
    error = ssh.failure(server.host(host_key=wrong))
    assert error.kind is ErrorKind.HOST_KEY
    assert right in error.message
    assert wrong in error.message


def test_pin_goes_before_what_was_learned(ssh: Ssh) -> None:
    server = ssh.servers()
    ssh.with_session(server, hello)
    error = ssh.failure(server.host(host_key=fingerprint_of(make_key(ssh.folder / "other"))))
    assert error.kind is ErrorKind.HOST_KEY


def test_many_hosts_are_learned_at_once_by_several_processes(ssh: Ssh) -> None:
    ports = [ssh.servers().port for _ in range(8)]
    program = f"""
import asyncio, sys
from clusterkit.hosts.model import Host
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
options = SshOptions(private_key_files=({str(ssh.key)!r},), username="root")
async def one(port):
    await (await connect(Host(name=f"h{{port}}", address="127.0.0.1", port=port), options)).close()
async def main():
    await asyncio.gather(*map(one, {ports}))
asyncio.run(main())
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    names = [line.split()[0] for line in ssh.known_hosts.read_text().splitlines()]
    assert sorted(names) == sorted(f"[127.0.0.1]:{port}" for port in ports)


def test_file_that_cannot_be_written_is_said(ssh: Ssh) -> None:
    ssh.known_hosts.mkdir(parents=True)
    error = ssh.failure(ssh.servers())
    assert error.kind is ErrorKind.HOST_KEY
    assert str(ssh.known_hosts) in error.message


def test_revoked_key_is_refused(ssh: Ssh) -> None:
    server = ssh.servers()
    public = " ".join(ssh.servers.host_key.with_suffix(".pub").read_text().split()[:2])
    (ssh.home / ".ssh" / "known_hosts").write_text(f"@revoked * {public}\n")
    error = ssh.failure(server)
    assert error.kind is ErrorKind.HOST_KEY
    assert "revoked" in error.message


def test_host_key_signed_by_a_known_authority(ssh: Ssh) -> None:
    authority = make_key(ssh.folder / "authority")
    host_key = make_key(ssh.folder / "signed")
    subprocess.run(
        ["ssh-keygen", "-q", "-s", authority, "-I", "h", "-h", "-n", "127.0.0.1", f"{host_key}.pub"], check=True
    )
    server = ssh.servers(f"HostCertificate {host_key}-cert.pub", host_key=host_key)
    public = " ".join(authority.with_suffix(".pub").read_text().split()[:2])
    (ssh.home / ".ssh" / "known_hosts").write_text(f"@cert-authority [127.0.0.1]:* {public}\n")
    assert ssh.with_session(server, hello, ssh.options(host_key_policy="strict")) == "hello"


def test_host_met_several_times_at_once_is_learned_once(ssh: Ssh) -> None:
    server = ssh.servers()

    async def scenario() -> list[str]:
        async def one() -> str:
            async with ssh.session(server) as session:
                return await hello(session)

        return list(await asyncio.gather(*(one() for _ in range(6))))

    assert asyncio.run(scenario()) == ["hello"] * 6
    assert len(ssh.known_hosts.read_text().splitlines()) == 1
