"""How to connect to the hosts of one command: its options and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from clusterkit.hosts.folders import config_folder
from clusterkit.ssh.bastions import Bastions
from clusterkit.ssh.keys import KeyRing
from clusterkit.ssh.secrets import Secrets

HostKeyPolicy = Literal["accept-new", "strict"]


def _ssh_files(own: str, system: str) -> tuple[Path, ...]:
    return (Path("~/.ssh", own).expanduser(), Path("/etc/ssh", system))


@dataclass(frozen=True)
class SshOptions:
    """Options for all hosts. Settings of a `Host` go before them, ~/.ssh/config comes after them.

    Sessions with the same options share bastions, keys and answers to prompts.
    """

    private_key_files: tuple[str, ...] = ()
    username: str | None = None
    port: int | None = None
    proxy_jump: str | None = None
    host_key_policy: HostKeyPolicy = "accept-new"
    # clusterkit's own file, which accept-new adds to; the others are only read
    known_hosts: Path = field(default_factory=lambda: config_folder() / "known_hosts")
    trusted_known_hosts: tuple[Path, ...] = field(default_factory=lambda: _ssh_files("known_hosts", "ssh_known_hosts"))
    ssh_config: tuple[Path, ...] = field(default_factory=lambda: _ssh_files("config", "ssh_config"))
    connect_timeout: float = 15.0  # seconds for each part of the login: port, host key, authentication
    keepalive: float = 4.0  # seconds of silence before a question to the host; after four the connection is lost
    bastion_limit: int = 16  # sockets that are opened through one bastion at once
    secrets: Secrets = field(default_factory=Secrets, repr=False, compare=False)
    keys: KeyRing = field(default_factory=KeyRing, repr=False, compare=False)
    bastions: Bastions = field(default_factory=Bastions, repr=False, compare=False)
