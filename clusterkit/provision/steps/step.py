"""A provisioning step: it compares a host's facts with the desired state and returns actions. The engine runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from clusterkit.hosts.model import Cluster
from clusterkit.provision.facts.model import Facts


@dataclass(frozen=True, slots=True)
class Action:
    """One change of a host. After a kill at any point the script can be run again."""

    title: str  # imperative, as a plan shows it: "install docker-ce"
    script: str  # POSIX sh, run as root under `set -eu`
    stdin: bytes = b""  # what the script reads; never shown
    timeout: float = 600.0  # seconds
    retries: int = 0  # further tries after a failure that may pass (a package mirror, a registry)


class Refused(Exception):  # noqa: N818 (it reads as what it is)
    """The step cannot or must not be done on this host. `fix` says what the user can do."""

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
    ca_bundle: bytes = b""  # PEM certificates to trust beside the host's own
    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    bundle: str = ""  # folder on the host that an air-gapped bundle was unpacked to
    force: bool = False  # restart Docker although other people's containers run
    gpus: bool | None = None  # None: use the GPUs that the host has


class Step(NamedTuple):
    """One column of the table that `setup` prints.

    `plan` is pure: it returns the actions that take a host from its facts to the desired state, in order, and none
    where nothing has to be done. It raises Refused where the host cannot get there.
    """

    name: str
    plan: Callable[[Facts, DesiredState], tuple[Action, ...]]
