"""How the hosts of one command are connected to: what its options and defaults say for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from clusterkit.hosts.folders import config_folder
from clusterkit.ssh.bastions import Bastions
from clusterkit.ssh.keys import KeyRing
from clusterkit.ssh.secrets import Secrets

HostKeyPolicy = Literal["accept-new", "strict"]


def _own_known_hosts() -> Path:
    return config_folder() / "known_hosts"


def _trusted_known_hosts() -> tuple[Path, ...]:
    return (Path("~/.ssh/known_hosts").expanduser(), Path("/etc/ssh/ssh_known_hosts"))


def _ssh_config_files() -> tuple[Path, ...]:
    return (Path("~/.ssh/config").expanduser(), Path("/etc/ssh/ssh_config"))


@dataclass(frozen=True)
class SshOptions:
    """Options for all hosts; what a `Host` says for itself goes before them, ~/.ssh/config comes after them.

    known_hosts: clusterkit's own file, which accept-new adds to. trusted_known_hosts: read, never written.
    connect_timeout: seconds until a host must have let us in. keepalive: seconds of silence until a host is asked
    whether it is still there; it is given up after four of them. sockets through one bastion are opened
    `bastion_limit` at a time. Sessions of the same options share bastions, keys and answers to prompts.
    """

    private_key_files: tuple[str, ...] = ()
    username: str | None = None
    port: int | None = None
    proxy_jump: str | None = None
    host_key_policy: HostKeyPolicy = "accept-new"
    known_hosts: Path = field(default_factory=_own_known_hosts)
    trusted_known_hosts: tuple[Path, ...] = field(default_factory=_trusted_known_hosts)
    ssh_config: tuple[Path, ...] = field(default_factory=_ssh_config_files)
    connect_timeout: float = 15.0
    keepalive: float = 4.0
    bastion_limit: int = 16
    secrets: Secrets = field(default_factory=Secrets, repr=False, compare=False)
    keys: KeyRing = field(default_factory=KeyRing, repr=False, compare=False)
    bastions: Bastions = field(default_factory=Bastions, repr=False, compare=False)
