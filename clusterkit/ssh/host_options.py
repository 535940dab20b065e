"""The options that name hosts, as they were typed. Few imports, since every `--help` loads this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostOptions:
    """What the user typed, unchecked; `clusterkit.ssh.selection.select` checks it."""

    hostnames: list[str] | None = None
    cluster: str | None = None
    private_key_file: list[str] | None = None
    ssh_port: int | None = None
    username: str | None = None
    bastion: str | None = None
    host_key_policy: str = "accept-new"
    ask_password: bool = False
    ask_sudo_password: bool = False
    connect_timeout: float = 15.0
    head: str | None = None
    storage: str | None = None
    limit: list[str] | None = None
    exclude: list[str] | None = None
