"""Where and as whom a host is connected to: its own words, then the command's options, then ~/.ssh/config."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asyncssh.config import ConfigParseError, SSHClientConfig

from clusterkit.hosts.model import Host
from clusterkit.hosts.names import parse_host
from clusterkit.ssh.endpoint import Endpoint
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.ssh.options import SshOptions


def resolve(host: Host, options: SshOptions) -> Endpoint:
    """Endpoint of a host.

    Raises:
        UserError: ~/.ssh/config cannot be read.

    """
    port, username = host.port or options.port, host.username or options.username
    config = _config(host.target, port, username, options)
    jump, proxy_command = host.proxy_jump or options.proxy_jump, ""
    if jump is None:
        # As in ssh, the first of the two that the file names counts; most files name one.
        jump = config("ProxyJump", "none")
        proxy_command = config("ProxyCommand", "none") if jump == "none" else "none"
    return Endpoint(
        name=host.name,
        address=config("Hostname", host.target),
        port=port or config("Port", 22),
        username=username or config("User", "") or getpass.getuser(),
        key_name=config("HostKeyAlias", "") or config("Hostname", host.target),
        required_keys=_paths([*host.identity_files, *options.private_key_files]),
        optional_keys=_paths(config("IdentityFile", [])),
        identities_only=config("IdentitiesOnly", False),
        agent=_agent(config("IdentityAgent", "SSH_AUTH_SOCK")),
        jump=split_jump(jump),
        proxy_command="" if proxy_command == "none" else proxy_command,
        host_key=host.host_key,
    )


def resolve_bastion(jump: tuple[str, ...], options: SshOptions) -> Endpoint:
    """Endpoint of the last bastion of a chain. As in ssh, --username and --ssh-port mean the hosts behind it.

    Raises:
        UserError: no valid name; ~/.ssh/config cannot be read.

    """
    before, host = jump[:-1], parse_host(jump[-1])
    config = _config(host.target, host.port, host.username, options)
    own_jump = "none" if before else config("ProxyJump", "none")
    return Endpoint(
        name=f"bastion {host.name}",
        address=config("Hostname", host.target),
        port=host.port or config("Port", 22),
        username=host.username or config("User", "") or getpass.getuser(),
        key_name=config("HostKeyAlias", "") or config("Hostname", host.target),
        required_keys=_paths(options.private_key_files),
        optional_keys=_paths(config("IdentityFile", [])),
        identities_only=config("IdentitiesOnly", False),
        agent=_agent(config("IdentityAgent", "SSH_AUTH_SOCK")),
        jump=before or split_jump(own_jump),
    )


def split_jump(jump: str) -> tuple[str, ...]:
    """Bastions of a ProxyJump value, the one nearest to us first; `none` is none."""
    return () if jump == "none" else tuple(part.strip() for part in jump.split(",") if part.strip())


class _config:  # noqa: N801 (used as a function)
    """Values of ~/.ssh/config for one host, by option name."""

    def __init__(self, target: str, port: int | None, username: str | None, options: SshOptions) -> None:
        files = [path for path in options.ssh_config if os.access(path, os.R_OK)]
        unset: Any = ()
        try:
            self._values = SSHClientConfig.load(
                None,
                cast(Any, files),
                False,
                False,
                False,
                getpass.getuser(),
                username or unset,
                target,
                port or unset,
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
