"""What clusterkit knows about a cluster before it connects: its hosts, and how to reach each."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from clusterkit.common.records import Record

_Port = Annotated[int, Field(ge=1, le=65535)]


class Host(Record):
    """One machine. What is empty or None comes from the command's options, then from ~/.ssh/config."""

    name: str
    """The user's name for it, in tables, logs and the inventory; also the address where `address` is empty."""
    address: str = ""
    """Host name or IP address to connect to."""
    port: _Port | None = None
    """SSH port."""
    username: str | None = None
    """Account to log in with."""
    identity_files: tuple[str, ...] = ()
    """Private keys to offer before those of the agent."""
    proxy_jump: str | None = None
    """Bastion: [user@]host[:port], several separated by commas."""
    private_address: str | None = None
    """Address at which the other nodes reach this one; default: found by the route to the head."""
    interface: str | None = None
    """Network interface for Ray, NCCL and gloo; default: that of `private_address`."""
    host_key: str | None = None
    """SHA256:… fingerprint that the host must show."""

    @property
    def target(self) -> str:
        """The name or address to connect to, before ~/.ssh/config maps it."""
        return self.address or self.name


class Login(Record):
    """How to log in to hosts without settings of their own. A command's options go before it."""

    username: str | None = None
    port: _Port | None = None
    identity_files: tuple[str, ...] = ()
    proxy_jump: str | None = None


class Cluster(Record):
    """Hosts under one name, with the settings that later commands need."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = "default"
    hosts: Annotated[tuple[Host, ...], Field(min_length=1)]
    head: str = ""
    """Name of the head node; default: the first host."""
    storage: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] = "/storage"
    """Folder that all hosts share."""
    login: Login = Login()
    """Options of the login from the command that set the cluster up, for later commands."""

    @model_validator(mode="after")
    def _names_are_whole(self) -> Self:
        names = [host.name for host in self.hosts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: named twice; name every host once")
        if self.head and self.head not in names:
            raise ValueError(f"head {self.head} is none of the hosts ({', '.join(names)})")
        return self

    @property
    def head_host(self) -> Host:
        """The head node."""
        return next((host for host in self.hosts if host.name == self.head), self.hosts[0])

    @property
    def workers(self) -> tuple[Host, ...]:
        """All hosts but the head node."""
        return tuple(host for host in self.hosts if host is not self.head_host)
