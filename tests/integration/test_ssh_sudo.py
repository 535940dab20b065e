"""Being root through the real sudo, with real users and passwords."""

from __future__ import annotations

import asyncio
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sshd import Account, Ssh, account, on_terminal

from clusterkit.ssh.api import ErrorKind, HostError
from trainer.errors import UserError

pytest_plugins = ["sshd_fixture"]


@pytest.fixture(scope="module")
def cautious() -> Iterator[Account]:
    """A user who must give a password to sudo."""
    with account(sudo="password") as user:
        yield user


@pytest.fixture(scope="module")
def trusted() -> Iterator[Account]:
    """A user who need not."""
    with account(sudo="nopasswd") as user:
        yield user


async def as_root(session):  # type: ignore[no-untyped-def]
    return await session.run("id -u; cat", root=True, stdin=b"the script's own stdin\n")


def test_root_needs_no_sudo(ssh: Ssh) -> None:
    result = ssh.with_session(ssh.servers().host(username="root"), as_root)
    assert result.stdout == "0\nthe script's own stdin\n"


def test_sudo_without_a_password(ssh: Ssh, trusted: Account) -> None:
    host = ssh.servers().host(username=trusted.name)
    assert ssh.with_session(host, as_root).stdout == "0\nthe script's own stdin\n"
    assert ssh.with_session(host, lambda session: session.run("id -un")).stdout == f"{trusted.name}\n"


def test_password_of_the_environment(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)
    result = ssh.with_session(ssh.servers().host(username=cautious.name), as_root)
    assert (result.stdout, result.stderr) == ("0\nthe script's own stdin\n", "")


def test_password_of_a_file_for_one_host(ssh: Ssh, cautious: Account) -> None:
    server = ssh.servers()
    file = ssh.folder / "config" / "sudo" / "gpu-a"
    file.parent.mkdir(parents=True)
    file.write_text(f"{cautious.password}\n")
    file.chmod(0o600)
    host = server.host("gpu-a", username=cautious.name)
    assert ssh.with_session(host, as_root).ok
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        ssh.with_session(host, as_root)


def test_password_is_asked_for_once_for_all_hosts(ssh: Ssh, cautious: Account) -> None:
    ports = [ssh.servers().port for _ in range(3)]
    program = f"""
import asyncio
from clusterkit.hosts.model import Host
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.secrets import Secrets
options = SshOptions(
    private_key_files=({str(ssh.key)!r},), username={cautious.name!r}, secrets=Secrets(ask_sudo_password=True)
)
async def one(port):
    session = await connect(Host(name=f"h{{port}}", address="127.0.0.1", port=port), options)
    print("am", (await session.run("id -un", root=True)).stdout.strip())
    await session.close()
async def main():
    await asyncio.gather(*map(one, {ports}))
asyncio.run(main())
"""
    shown = on_terminal(program, "sudo password of", [cautious.password])
    assert shown.count("sudo password of") == 1
    assert shown.count("am root") == 3
    assert cautious.password not in shown


def test_sudo_in_a_terminal_of_its_own(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of newer sudo (use_pty); with a log of input and output it is the same."""
    rule = Path("/etc/sudoers.d") / f"{cautious.name}_pty"
    rule.write_text(f"Defaults:{cautious.name} use_pty\n")
    rule.chmod(0o440)
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)
    try:
        host = ssh.servers().host(username=cautious.name)
        assert ssh.with_session(host, as_root).stdout == "0\nthe script's own stdin\n"
        big = ssh.with_session(host, lambda session: session.run("wc -c", root=True, stdin=b"x" * 5_000_000))
        assert big.stdout.strip() == "5000000"
    finally:
        rule.unlink()


def test_several_commands_become_root_at_once(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)

    async def work(session):  # type: ignore[no-untyped-def]
        return await asyncio.gather(*(session.run("id -u", root=True) for _ in range(12)))

    results = ssh.with_session(ssh.servers().host(username=cautious.name), work)
    assert [result.stdout for result in results] == ["0\n"] * 12


def test_wrong_password_is_told_once_and_quickly(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the script nor its stdin may be taken for further guesses, nor may the account get locked."""
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", "not-the-password")

    async def work(session):  # type: ignore[no-untyped-def]
        errors = []
        for _ in range(2):
            with pytest.raises(HostError) as caught:
                await session.run(f"touch {ssh.folder}/ran", root=True, stdin=b"a\nb\nc\n", timeout=20)
            errors.append(caught.value)
        assert (await session.run("echo still here")).ok
        return errors

    first, second = ssh.with_session(ssh.servers().host(username=cautious.name), work)
    assert first is second  # the second was not tried
    assert first.kind is ErrorKind.SUDO
    assert "does not accept the password" in first.message
    assert "--ask-sudo-password" in first.fix
    assert "not-the-password" not in str(first)
    assert not (ssh.folder / "ran").exists()


def test_no_password_given_says_how(ssh: Ssh, cautious: Account) -> None:
    with pytest.raises(HostError) as caught:
        ssh.with_session(ssh.servers().host(username=cautious.name), as_root)
    assert caught.value.kind is ErrorKind.SUDO
    assert "CLUSTERKIT_SUDO_PASSWORD" in caught.value.fix


def test_user_who_may_not(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    with account() as user:
        monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", user.password)
        with pytest.raises(HostError) as caught:
            ssh.with_session(ssh.servers().host(username=user.name), as_root)
    assert caught.value.kind is ErrorKind.SUDO
    assert "not in the sudoers file" in caught.value.message


def test_password_never_shows(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)

    async def work(session):  # type: ignore[no-untyped-def]
        return await session.run("env; cat /proc/[0-9]*/cmdline", root=True)

    result = ssh.with_session(ssh.servers().host(username=cautious.name), work)
    assert "COMMAND" not in result.stderr
    assert cautious.password not in result.stdout + result.stderr


def test_put_as_root(ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)
    folder = ssh.folder / "roots"
    folder.mkdir(mode=0o700)
    host = ssh.servers().host(username=cautious.name)
    with pytest.raises(HostError) as caught:
        ssh.with_session(host, lambda session: session.put(b"x", str(folder / "f")))
    assert caught.value.kind is ErrorKind.WRITE
    ssh.with_session(host, lambda session: session.put(b"bytes\n", str(folder / "f"), mode=0o600, root=True))
    made = (folder / "f").stat()
    assert (made.st_uid, stat.S_IMODE(made.st_mode)) == (0, 0o600)
    assert (folder / "f").read_text() == "bytes\n"


@pytest.mark.parametrize("pty", [False, True])
def test_time_limit_ends_processes_of_root(
    ssh: Ssh, cautious: Account, monkeypatch: pytest.MonkeyPatch, pty: bool
) -> None:
    monkeypatch.setenv("CLUSTERKIT_SUDO_PASSWORD", cautious.password)
    rule = Path("/etc/sudoers.d") / f"{cautious.name}_pty"
    rule.write_text(f"Defaults:{cautious.name} {'' if pty else '!'}use_pty\n")
    rule.chmod(0o440)
    pids: list[str] = []
    try:
        with pytest.raises(HostError) as caught:
            ssh.with_session(
                ssh.servers().host(username=cautious.name),
                lambda session: session.run(
                    "echo $$; sleep 300 | sleep 301", root=True, timeout=3.0, on_output=pids.append
                ),
            )
    finally:
        rule.unlink()
    assert caught.value.kind is ErrorKind.TIMEOUT
    command = ["pgrep", "-g", pids[0], "--runstates", "D,R,S"]
    assert subprocess.run(command, capture_output=True, check=False).stdout == b""
