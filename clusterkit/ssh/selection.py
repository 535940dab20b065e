"""Check the options that name hosts: which hosts a command is for, and how to log in to them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from clusterkit.common.suggest import did_you_mean
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.hosts.names import USER, expand_names, parse_host, parse_hosts
from clusterkit.ssh.config_file import split_jump
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.options import SshOptions
from clusterkit.ssh.secrets import Secrets
from trainer.errors import UserError


@dataclass(frozen=True)
class Selection:
    """A checked `HostOptions`."""

    cluster: Cluster  # all hosts, with the typed options of the login, ready to be saved
    ssh: SshOptions
    hosts: tuple[Host, ...]  # without those that --limit and --exclude leave out


def select(options: HostOptions) -> Selection:
    """Return the cluster, how to connect to it, and the selected hosts.

    Raises:
        UserError: malformed names or options, an unknown cluster, or a pattern that no host matches.
    """
    if options.host_key_policy not in ("accept-new", "strict"):
        raise UserError(f"--host-key-policy '{options.host_key_policy}': it is accept-new or strict.")
    if options.connect_timeout <= 0:
        raise UserError(f"--connect-timeout {options.connect_timeout:g}: it must be above 0.")
    cluster = cluster_of(options)
    login = cluster.login
    ssh = SshOptions(
        private_key_files=login.identity_files,
        username=login.username,
        port=login.port,
        proxy_jump=login.proxy_jump,
        host_key_policy="strict" if options.host_key_policy == "strict" else "accept-new",
        connect_timeout=options.connect_timeout,
        # Who waits longer for a login over a lossy network waits as long for a connection that has gone silent.
        keepalive=max(SshOptions.keepalive, options.connect_timeout / 4),
        secrets=Secrets(options.ask_password, options.ask_sudo_password),
    )
    return Selection(cluster, ssh, _limited(cluster, options.limit or [], options.exclude or []))


def cluster_of(options: HostOptions) -> Cluster:
    """Return the saved cluster of that name, or one of the typed hosts. Nothing is saved.

    A typed host without settings has those of the saved host of the same name.
    """
    name = options.cluster or inventory.DEFAULT
    kept: Cluster | None = None
    if options.hostnames is None or inventory.path_of(name).exists():
        kept = inventory.load(name)
    values: dict[str, Any] = kept.model_dump() if kept else {"name": name}
    if options.hostnames is not None:
        hosts = parse_hosts(options.hostnames)
        known = {host.name: host.model_dump() for host in kept.hosts} if kept else {}
        values["hosts"] = [known.get(host.name, {}) | host.model_dump(exclude_defaults=True) for host in hosts]
        if values.get("head") not in {host.name for host in hosts}:
            values["head"] = ""
    values |= {key: value for key in ("head", "storage") if (value := getattr(options, key)) is not None}
    values["login"] = values.get("login", {}) | _typed_login(options)
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in message["loc"])
        reason = message["msg"].removeprefix("Value error, ")
        raise UserError(f"--{where.removeprefix('login.')}: {reason}" if where else reason) from None


def _typed_login(options: HostOptions) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    if options.username is not None:
        if not USER.fullmatch(options.username):
            raise UserError(f"--username '{options.username}': this is no user name.")
        typed["username"] = options.username
    if options.ssh_port is not None:
        if not 1 <= options.ssh_port <= 65535:
            raise UserError(f"--ssh-port {options.ssh_port}: a port is a number from 1 to 65535.")
        typed["port"] = options.ssh_port
    if options.private_key_file:
        # Absolute, for commands that run in another folder.
        typed["identity_files"] = tuple(str(Path(file).expanduser().absolute()) for file in options.private_key_file)
    if options.bastion is not None:
        for bastion in split_jump(options.bastion):
            parse_host(bastion)
        typed["proxy_jump"] = options.bastion
    return typed


def _limited(cluster: Cluster, limit: list[str], exclude: list[str]) -> tuple[Host, ...]:
    named = {name for pattern in limit for name in _matching(cluster, pattern, "--limit")} if limit else None
    unwanted = {name for pattern in exclude for name in _matching(cluster, pattern, "--exclude")}
    hosts = tuple(host for host in cluster.hosts if (named is None or host.name in named) and host.name not in unwanted)
    if not hosts:
        raise UserError("--limit and --exclude leave no host.")
    return hosts


def _matching(cluster: Cluster, pattern: str, option: str) -> set[str]:
    names = [host.name for host in cluster.hosts]
    found: set[str] = set()
    for part in [pattern] if pattern in names else expand_names(pattern):
        matches = {name for name in names if name == part or fnmatchcase(name, part)}
        if not matches:
            raise UserError(f"{option} {part}: no such host.{did_you_mean(part, names)} Hosts: {', '.join(names)}.")
        found |= matches
    return found
