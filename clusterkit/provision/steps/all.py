"""All steps that prepare a host, in order, and the facts that they decide by."""

from __future__ import annotations

from clusterkit.provision.steps import (
    apt,
    daemon,
    docker,
    dockerd_scripts,
    packages,
    repositories,
    shell,
    storage,
    systems,
    toolkit,
)
from clusterkit.provision.steps.step import Step

STEPS = (
    Step("system", systems.plan),
    Step("packages", packages.plan),
    Step("docker", docker.plan),
    Step("toolkit", toolkit.plan),
    Step("daemon", daemon.plan),
    Step("storage", storage.plan),
)

PROBED_PACKAGES = ("ca-certificates", *docker.CONFLICTING_PACKAGES, *toolkit.TOOLKIT_PACKAGES)
"""Packages whose installed versions the steps read (`Facts.packages`)."""

PROBED_COMMANDS = ("curl", "git", "git-lfs", "gpg", "zstd", "docker", "dockerd")
"""Commands whose paths the steps read (`Facts.commands`)."""

PROBED_FILES = (
    shell.PROXY_ENV,
    packages.APT_PROXY,
    *packages.CA_FILES.values(),
    packages.CA_PENDING,
    packages.INSTALL_PENDING,
    apt.MIRROR_FILE,
    *repositories.FILES,
    packages.DOCKERD_DROP_IN,
    dockerd_scripts.DOCKERD_ENV,
    daemon.DAEMON_JSON,
    daemon.PENDING,
)
"""Files whose SHA-256 the steps read (`Facts.files`)."""
