"""What a step is: facts and wish in, actions out. No step talks to a host; the engine does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.facts.model import Facts


@dataclass(frozen=True, slots=True)
class Action:
    """One change of a host: a POSIX sh script, run as root under `set -eu`, that may be run again after a kill.

    title: imperative, as a plan shows it ("install docker-ce"). stdin: what the script reads, never shown. timeout:
    seconds. retries: further tries after a failure that may pass (a package mirror, a registry).
    """

    title: str
    script: str
    stdin: bytes = b""
    timeout: float = 600.0
    retries: int = 0


class Refused(Exception):  # noqa: N818 (it reads as what it is)
    """The step cannot or must not be done on this host. `fix`: what the user can do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What `clusterkit setup` was asked for, the same for all hosts."""

    cluster: Cluster
    docker_source: str = "auto"  # auto | docker | distribution: Docker's own repository, or the distribution's package
    docker_url: str = "https://download.docker.com"
    nvidia_url: str = "https://nvidia.github.io/libnvidia-container"
    apt_mirror: str = ""
    pip_index_url: str = ""
    pip_find_links: str = ""
    hf_endpoint: str = ""
    ca_bundle: bytes = b""  # PEM certificates to trust beside the host's own
    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    bundle: str = ""  # folder on the host that an air-gapped bundle was unpacked to
    force: bool = False  # restart Docker although foreign containers run
    image: str = ""  # reference of the runtime image
    gpus: bool | None = None  # None: whatever the host has
    extra: dict[str, str] = field(default_factory=dict)


class Step(Protocol):
    """One row of the table. `plan` is pure: the same facts give the same actions; none means nothing to do."""

    name: str

    def plan(self, host: Host, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
        """Actions that take the host to the wished state, in order.

        Raises:
            Refused: it cannot be done here.

        """
        ...
