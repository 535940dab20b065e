"""Logging in to real SSH servers: every kind of key, the agent, passphrases, passwords, aliases, refusals."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sshd import Ssh, account, fingerprint_of, make_key, on_terminal, ssh_agent

from clusterkit.hosts.model import Host
from clusterkit.ssh.api import ErrorKind
from clusterkit.ssh.secrets import Secrets
from trainer.errors import UserError

pytest_plugins = ["sshd_fixture"]


async def whoami(session) -> str:  # type: ignore[no-untyped-def]
    return (await session.run("id -un")).stdout.strip()


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_any_type_of_key_lets_us_in(ssh: Ssh, kind: str) -> None:
    key = make_key(ssh.folder / kind, kind)
    ssh.servers.trust(key)
    assert ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=(str(key),))) == "root"


def test_default_key_needs_no_naming(ssh: Ssh) -> None:
    ssh.servers.trust(make_key(ssh.home / ".ssh" / "id_ecdsa", "ecdsa"))
    assert ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=())) == "root"


def test_agent_lets_us_in(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ssh.servers()
    with ssh_agent(make_key(ssh.folder / "other"), ssh.key) as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        assert ssh.with_session(server, whoami, ssh.options(private_key_files=())) == "root"


def test_many_hosts_use_one_agent_at_once(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [ssh.servers() for _ in range(5)]

    async def scenario() -> list[str]:
        options = ssh.options(private_key_files=())

        async def one(server) -> str:  # type: ignore[no-untyped-def]
            async with ssh.session(server, options) as session:
                return await whoami(session)

        return list(await asyncio.gather(*map(one, servers)))

    with ssh_agent(ssh.key) as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        assert asyncio.run(scenario()) == ["root"] * 5


def test_agent_answers_for_a_key_file_with_a_passphrase(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent holds the key already: nobody is asked, and there is no terminal to ask on."""
    locked = ssh.folder / "locked"
    make_key(locked)
    ssh.servers.trust(locked)
    with ssh_agent(locked) as socket:
        set_passphrase(locked, "velvet")
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        assert ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=(str(locked),))) == "root"


def test_passphrase_without_a_terminal_says_how_to_go_on(ssh: Ssh) -> None:
    locked = make_key(ssh.folder / "locked", passphrase="velvet")
    with pytest.raises(UserError, match=r"there is no terminal.\n.*ssh-add"):
        ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=(str(locked),)))


def test_passphrase_is_asked_for_once_for_all_hosts(ssh: Ssh) -> None:
    """On a real terminal, with a slip at the first try."""
    locked = make_key(ssh.folder / "locked", "rsa", passphrase="velvet")
    ssh.servers.trust(locked)
    ports = [ssh.servers().port for _ in range(3)]
    program = f"""
import asyncio
from clusterkit.hosts.model import Host
from clusterkit.ssh.connection import connect
from clusterkit.ssh.options import SshOptions
options = SshOptions(private_key_files=({str(locked)!r},))
async def one(port):
    session = await connect(Host(name=f"h{{port}}", address="127.0.0.1", port=port, username="root"), options)
    print("in", (await session.run("id -un")).stdout.strip())
    await session.close()
async def main():
    await asyncio.gather(*map(one, {ports}))
asyncio.run(main())
"""
    shown = on_terminal(program, "Passphrase of", ["wrong", "velvet"])
    assert shown.count("Passphrase of") == 2
    assert "Wrong passphrase." in shown
    assert shown.count("in root") == 3
    assert "velvet" not in shown


def test_password_and_questions_of_the_host(ssh: Ssh) -> None:
    """PAM asks for it (keyboard-interactive); the answer is the one that was asked for on the terminal."""
    server = ssh.servers("KbdInteractiveAuthentication yes", "PubkeyAuthentication no", use_pam=True)
    with account() as user:
        host = server.host(username=user.name)
        secrets = Secrets(ask_login_password=True)
        answered(secrets, f"login {user.name}", user.password)
        assert ssh.with_session(host, whoami, ssh.options(secrets=secrets)) == user.name
        answered(secrets, f"login {user.name}", "wrong")
        error = ssh.failure(host, ssh.options(secrets=secrets))
    assert error.kind is ErrorKind.LOGIN
    assert "answers to the host's questions" in error.message
    assert "wrong" not in str(error)


def test_password_authentication(ssh: Ssh) -> None:
    server = ssh.servers("PasswordAuthentication yes", use_pam=True)
    with account() as user:
        secrets = Secrets(ask_login_password=True)
        answered(secrets, f"login {user.name}", user.password)
        options = ssh.options(secrets=secrets, private_key_files=())
        assert ssh.with_session(server.host(username=user.name), whoami, options) == user.name


def test_wrong_key_names_the_keys_tried_and_what_the_host_offers(ssh: Ssh) -> None:
    stranger = make_key(ssh.folder / "stranger")
    error = ssh.failure(ssh.servers(), ssh.options(private_key_files=(str(stranger),)))
    assert error.kind is ErrorKind.LOGIN
    assert f"{stranger} (ssh-ed25519 {fingerprint_of(stranger)})" in error.message
    assert "The host offers: publickey." in error.message
    assert "--private-key-file" in error.fix
    assert f"Try: ssh -i {stranger} -p" in error.fix


def test_no_key_at_all(ssh: Ssh) -> None:
    error = ssh.failure(ssh.servers(), ssh.options(private_key_files=()))
    assert error.kind is ErrorKind.LOGIN
    assert "there was no key that could be offered" in error.message


def test_too_many_keys_in_the_agent_still_try_the_named_one_first(ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ssh.servers("MaxAuthTries 2")
    with ssh_agent(*(make_key(ssh.folder / f"k{n}") for n in range(4))) as socket:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)
        assert ssh.with_session(server, whoami) == "root"
        error = ssh.failure(server, ssh.options(private_key_files=()))
    assert error.kind is ErrorKind.LOGIN
    assert "too many keys" in error.message


def test_named_key_that_is_not_there_is_bad_usage(ssh: Ssh) -> None:
    with pytest.raises(UserError, match=r"no private key /nowhere/key"):
        ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=("/nowhere/key",)))


def test_file_that_is_no_key_is_bad_usage(ssh: Ssh) -> None:
    with pytest.raises(UserError, match=r"host_key.pub is the public half of a key: name the private one, .*host_key$"):
        ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=(f"{ssh.servers.host_key}.pub",)))
    (ssh.folder / "text").write_text("text\n")
    with pytest.raises(UserError, match=r"text is no private key"):
        ssh.with_session(ssh.servers(), whoami, ssh.options(private_key_files=(str(ssh.folder / "text"),)))


def test_alias_of_the_ssh_configuration(ssh: Ssh) -> None:
    server = ssh.servers()
    (ssh.home / ".ssh" / "config").write_text(
        f"Host gpu-*\n  HostName 127.0.0.1\n  Port {server.port}\n  User root\n  IdentityFile {ssh.key}\n"
    )
    assert ssh.with_session(Host(name="gpu-a"), whoami, ssh.options(private_key_files=())) == "root"


def test_malformed_ssh_configuration_is_bad_usage(ssh: Ssh) -> None:
    (ssh.home / ".ssh" / "config").write_text("Port many\n")
    with pytest.raises(UserError, match=r"ssh configuration cannot be read: .*line 1"):
        ssh.with_session(ssh.servers(), whoami)


def test_account_without_a_shell_is_a_login_failure(ssh: Ssh) -> None:
    with account(shell="/usr/sbin/nologin") as user:
        error = ssh.failure(ssh.servers().host(username=user.name))
    assert error.kind is ErrorKind.LOGIN
    assert "not run commands" in error.message


def answered(secrets: Secrets, key: str, answer: str) -> None:
    """As if the user had been asked already."""

    async def keep() -> None:
        async def given() -> str:
            return answer

        secrets._once._answers.pop(key, None)
        await secrets._once.get(key, given)

    asyncio.run(keep())


def set_passphrase(key: Path, passphrase: str) -> None:
    os.spawnlp(os.P_WAIT, "ssh-keygen", "ssh-keygen", "-q", "-p", "-P", "", "-N", passphrase, "-f", str(key))
