"""Address, user and keys of a host: its own settings, then the command's options, then ~/.ssh/config."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from asyncssh.config import ConfigParseError, SSHClientConfig

from clusterkit.hosts.model import Host
from clusterkit.hosts.names import parse_host
from clusterkit.ssh.endpoint import Endpoint
from clusterkit.ssh.options import SshOptions
from trainer.errors import UserError


def resolve(host: Host, options: SshOptions) -> Endpoint:
    """Return the endpoint of a host. Raises UserError: ~/.ssh/config cannot be read."""
    port, username = host.port or options.port, host.username or options.username
    config = _config(host.target, port, username, options)
    jump, proxy_command = host.proxy_jump or options.proxy_jump, ""
    if jump is None:
        # As in ssh, the first of the two in the file counts; most files have one.
        jump = config("ProxyJump", "none")
        proxy_command = config("ProxyCommand", "none") if jump == "none" else "none"
    host = host.model_copy(update={"port": port, "username": username})
    endpoint = _endpoint(host.name, host, config, options, split_jump(jump))
    return replace(endpoint, proxy_command="" if proxy_command == "none" else proxy_command, host_key=host.host_key)


def resolve_bastion(jump: tuple[str, ...], options: SshOptions) -> Endpoint:
    """Return the endpoint of a chain's last bastion. As in ssh, --username and --ssh-port are for the hosts behind it.

    Raises:
        UserError: the name is malformed; ~/.ssh/config cannot be read.
    """
    before, host = jump[:-1], parse_host(jump[-1])
    config = _config(host.target, host.port, host.username, options)
    own_jump = "none" if before else config("ProxyJump", "none")
    return _endpoint(f"bastion {host.name}", host, config, options, before or split_jump(own_jump))


def _endpoint(name: str, host: Host, config: _config, options: SshOptions, jump: tuple[str, ...]) -> Endpoint:
    address = config("Hostname", host.target)
    return Endpoint(
        name=name,
        address=address,
        port=host.port or config("Port", 22),
        username=host.username or config("User", "") or getpass.getuser(),
        key_name=config("HostKeyAlias", "") or address,
        required_keys=_paths([*host.identity_files, *options.private_key_files]),
        optional_keys=_paths(config("IdentityFile", [])),
        identities_only=config("IdentitiesOnly", False),
        agent=_agent(config("IdentityAgent", "SSH_AUTH_SOCK")),
        jump=jump,
    )


def split_jump(jump: str) -> tuple[str, ...]:
    """Return the bastions of a ProxyJump value, the nearest to us first. `none` means no bastion."""
    return () if jump == "none" else tuple(part.strip() for part in jump.split(",") if part.strip())


class _config:  # noqa: N801 (used as a function)
    """Values of ~/.ssh/config for one host, by option name."""

    def __init__(self, target: str, port: int | None, username: str | None, options: SshOptions) -> None:
        files = [path for path in options.ssh_config if os.access(path, os.R_OK)]
        unset: Any = ()
        try:
            user = getpass.getuser()
            self._values = SSHClientConfig.load(
                None, cast(Any, files), False, False, False, user, username or unset, target, port or unset
            )
        except (ConfigParseError, UnicodeDecodeError, OSError) as error:
            raise UserError(f"the ssh configuration cannot be read: {error}") from None

    def __call__(self, option: str, default: Any) -> Any:
        value = self._values.get(option)
        return default if value in (None, ()) else value


def _paths(files: Sequence[str]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(Path(file).expanduser() for file in files if file != "none"))


def _agent(value: str) -> str:
    if value == "none":
        return ""
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK", "")
    return str(Path(os.path.expandvars(value)).expanduser())
