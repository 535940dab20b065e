"""Which value counts: the host's own, the option's, ~/.ssh/config's or the default."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from clusterkit.hosts.model import Host
from clusterkit.ssh.config_file import resolve, resolve_bastion
from clusterkit.ssh.options import SshOptions

CONFIG = """
Host gpu-*
  HostName %h.lab.example.com
  Port 2200
  User carol
  IdentityFile ~/.ssh/lab
  ProxyJump gate
  HostKeyAlias rack
  IdentityAgent ~/agent.sock
Host gate
  HostName gate.example.com
  Port 2022
Host direct
  ProxyJump none
Host piped
  ProxyCommand nc %h %p
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(CONFIG)
    return tmp_path


def options(**fields: object) -> SshOptions:
    return SshOptions(**fields)  # type: ignore[arg-type]


def test_configuration_fills_in_what_nobody_says(home: Path) -> None:
    endpoint = resolve(Host(name="gpu-a"), options())
    assert (endpoint.address, endpoint.port, endpoint.username) == ("gpu-a.lab.example.com", 2200, "carol")
    assert endpoint.optional_keys == (home / ".ssh/lab",)
    assert endpoint.jump == ("gate",)
    assert endpoint.known_as == "[rack]:2200"
    assert endpoint.agent == str(home / "agent.sock")


def test_options_go_before_the_configuration() -> None:
    endpoint = resolve(Host(name="gpu-a"), options(username="me", port=22, proxy_jump="x", private_key_files=("/k",)))
    assert (endpoint.username, endpoint.port, endpoint.jump) == ("me", 22, ("x",))
    assert endpoint.required_keys == (Path("/k"),)


def test_host_goes_before_the_options() -> None:
    host = Host(name="n", address="gpu-a", username="own", port=1, proxy_jump="none", identity_files=("/own",))
    endpoint = resolve(host, options(username="me", port=22, proxy_jump="x", private_key_files=("/k",)))
    assert (endpoint.name, endpoint.address) == ("n", "gpu-a.lab.example.com")
    assert (endpoint.username, endpoint.port, endpoint.jump) == ("own", 1, ())
    assert endpoint.required_keys == (Path("/own"), Path("/k"))


def test_defaults_are_those_of_ssh() -> None:
    endpoint = resolve(Host(name="Plain"), options())
    assert (endpoint.address, endpoint.port, endpoint.username) == ("Plain", 22, getpass.getuser())
    assert (endpoint.known_as, endpoint.agent, endpoint.jump) == ("plain", "", ())


def test_bastion_has_settings_of_its_own() -> None:
    """As with ssh -J: --username and --ssh-port mean the hosts behind it."""
    endpoint = resolve_bastion(("gate",), options(username="me", port=22))
    assert (endpoint.address, endpoint.port, endpoint.username) == ("gate.example.com", 2022, getpass.getuser())
    assert resolve_bastion(("a", "u@b:7"), options()).jump == ("a",)
    assert resolve_bastion(("a", "u@b:7"), options()).port == 7


def test_proxy_command_and_none() -> None:
    assert resolve(Host(name="piped", port=7), options()).proxy_command == "nc piped 7"
    assert resolve(Host(name="direct"), options()).jump == ()
    assert resolve(Host(name="piped"), options(proxy_jump="gate")).proxy_command == ""
