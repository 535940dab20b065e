"""All steps that prepare a host, in order, and the facts that they decide by."""

from __future__ import annotations

from clusterkit.hosts.model import Cluster
from clusterkit.provision.steps import apt, daemon, docker, dockerd_scripts, packages, shell, storage, toolkit
from clusterkit.provision.steps.step import Step
from clusterkit.provision.steps.systems import SystemStep

STEPS: tuple[Step, ...] = (
    SystemStep(),
    packages.PackagesStep(),
    docker.DockerStep(),
    toolkit.ToolkitStep(),
    daemon.DaemonStep(),
    storage.StorageStep(),
)

WANTED_PACKAGES: tuple[str, ...] = ("ca-certificates", *docker.IN_THE_WAY, *toolkit.TOOLKIT_PACKAGES)
"""Packages whose installed versions the steps ask for (`Facts.packages`)."""

WANTED_COMMANDS: tuple[str, ...] = ("curl", "git", "git-lfs", "gpg", "zstd", "docker", "dockerd")
"""Commands whose paths the steps ask for (`Facts.commands`)."""

WANTED_FILES: tuple[str, ...] = (
    shell.PROXY_ENV,
    packages.APT_PROXY,
    *packages.CA_FILES.values(),
    packages.CA_PENDING,
    packages.INSTALL_PENDING,
    apt.MIRROR_FILE,
    *(path for path, _ in docker.KEYS.values()),
    *docker.REPOSITORIES.values(),
    *toolkit.KEYS.values(),
    *toolkit.REPOSITORIES.values(),
    packages.DOCKERD_DROP_IN,
    dockerd_scripts.DOCKERD_ENV,
    daemon.DAEMON_JSON,
    daemon.PENDING,
)
"""Files whose SHA-256 the steps ask for (`Facts.files`)."""


def wanted_paths(cluster: Cluster) -> tuple[str, ...]:
    """Paths that the steps ask for in `Facts.disks`, beside those that are always read."""
    return storage.wanted_paths(cluster)
