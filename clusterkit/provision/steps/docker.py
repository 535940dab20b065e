"""Docker Engine: kept where one answers, started where one is installed, otherwise installed."""

from __future__ import annotations

import re

from clusterkit.provision.facts.model import Facts, version_numbers
from clusterkit.provision.steps import dockerd_scripts, repositories
from clusterkit.provision.steps.packages import install_action
from clusterkit.provision.steps.repositories import Repository
from clusterkit.provision.steps.step import Action, DesiredState, Refused
from clusterkit.provision.steps.systems import DEB, RPM, System, has_systemd, system_of

DOCKER_URL = "https://download.docker.com"
OLDEST = (20, 10)  # the first that runs containers on cgroup v2

FINGERPRINTS = {
    DEB: "9DC858229FC7DD38854AE2D88D81803C0EBFCD88",
    RPM: "060A61C51B558A7F742B77AAC52FEB6B621E9F35",
}
DOCKER_PACKAGES = ("docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin")
# The distribution's engine. Debian 13 keeps the docker command in a package of its own; elsewhere docker.io has it.
DISTRIBUTION_PACKAGES = {"debian-13": ("docker.io", "docker-cli")}
CONFLICTING_PACKAGES = tuple(
    "containerd runc docker.io docker-cli docker-buildx podman-docker docker docker-engine".split()
)
"""Packages of the distribution that Docker's own would replace, and so stop what runs on them."""

_NOT_RUNNING = re.compile(
    r"cannot connect to the docker daemon|failed to connect to the docker api|is the docker daemon running"
    r"|connection refused|no such file or directory",
    re.IGNORECASE,
)


def plan(facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    """Install Docker Engine, or start it, or do nothing where it answers.

    Raises:
        Refused: the engine is too old or broken, it comes from a snap, Podman poses as it, or packages of the
            distribution that others may be using conflict with it.
    """
    system = system_of(facts)
    docker = facts.docker
    _refuse_impostors(system, facts)
    modes = repositories.restore_modes(repository(system, desired.docker_url), facts)
    if docker.server:
        if version_numbers(docker.server, 2) < OLDEST:
            raise Refused(
                f"Docker {docker.server} is too old; {OLDEST[0]}.{OLDEST[1]} or newer is needed",
                "Upgrade it (that stops its containers, so clusterkit does not do it), then run the command again.",
            )
        return modes
    start = Action("start Docker", dockerd_scripts.start(has_systemd(facts)), timeout=180.0)
    if "dockerd" in facts.commands:
        _refuse_broken(facts)
        return (*modes, start)
    return (*modes, *_install(system, facts, desired), start)


def source_of(system: System, facts: Facts, desired: DesiredState) -> str:
    """Return where Docker comes from: `docker`, `distribution` or `bundle`.

    `auto` means Docker's own repository, with two exceptions on Debian and Ubuntu. Where the distribution's containerd
    or runc is installed, Docker's packages would replace them under whoever uses them. Where packages come from a
    mirror of the distribution and no mirror of Docker's was named, Docker's repository is out of reach.
    """
    if desired.bundle:
        return "bundle"
    if desired.docker_source == "auto":
        if system.family != DEB:
            return "docker"
        mirrored = bool(desired.apt_mirror) and desired.docker_url == DOCKER_URL
        return "distribution" if mirrored or {"containerd", "runc"} & facts.packages.keys() else "docker"
    return desired.docker_source


def distribution_packages(system: System) -> tuple[str, ...]:
    """Return the packages of the distribution's own engine; none where it has no engine."""
    return DISTRIBUTION_PACKAGES.get(system.name, ("docker.io",)) if system.family == DEB else ()


def repository(system: System, url: str) -> Repository:
    """Return Docker's repository at `url`, which may be a mirror."""
    # One repository for RHEL and what is built from it. Not $releasever: it may hold the minor release.
    vendor = f"{url.rstrip('/')}/linux/{system.id if system.family == DEB else 'rhel'}"
    base = vendor if system.family == DEB else f"{vendor}/{system.version}/$basearch/stable"
    key, fingerprint = f"{vendor}/gpg", FINGERPRINTS[system.family]
    return Repository(
        repositories.DOCKER, "Docker Engine", system.family, base, key, fingerprint, system.codename, "stable"
    )


def _install(system: System, facts: Facts, desired: DesiredState) -> tuple[Action, ...]:
    source = source_of(system, facts, desired)
    if source == "bundle":
        return (install_action(system, desired, (), title="install Docker Engine", bundled="docker"),)
    if source == "distribution":
        packages = distribution_packages(system)
        if not packages:
            raise Refused(
                f"{system.name} has no Docker Engine of its own",
                "Use Docker's repository (--docker-source docker), or a mirror of it (--docker-url).",
            )
        return (install_action(system, desired, packages),)
    blocking = sorted(facts.packages.keys() & set(CONFLICTING_PACKAGES))
    if blocking:
        remove = "apt-get remove" if system.family == DEB else "dnf remove"
        other = "use the distribution's Docker (--docker-source distribution), or " if system.family == DEB else ""
        raise Refused(
            f"{', '.join(blocking)} of the distribution is installed; Docker's packages would replace it and stop "
            "whatever runs on it",
            f"If nothing else needs it, remove it (`{remove} {' '.join(blocking)}`); else {other}"
            "install a Docker Engine yourself: one that answers is left as it is.",
        )
    added = repositories.add(repository(system, desired.docker_url), facts)
    return (*added, install_action(system, desired, DOCKER_PACKAGES))


def _refuse_impostors(system: System, facts: Facts) -> None:
    if facts.commands.get("docker", "").startswith("/snap/"):
        raise Refused(
            "Docker was installed as a snap, which confines it: it reaches neither the shared storage nor the GPUs",
            "Remove it (`snap remove docker`, which removes its containers too), then run the command again.",
        )
    if "podman-docker" in facts.packages or "podman" in facts.docker.error.lower():
        remove = "apt-get remove podman-docker" if system.family == DEB else "dnf remove podman-docker"
        raise Refused(
            "the docker command of this host is Podman's",
            f"Remove it (`{remove}`; Podman itself may stay), then run the command again.",
        )


def _refuse_broken(facts: Facts) -> None:
    error = facts.docker.error.strip()
    if "docker" in facts.commands and error and not _NOT_RUNNING.search(error):
        logs = "`journalctl -u docker`" if has_systemd(facts) else dockerd_scripts.DOCKERD_LOG
        raise Refused(
            f"Docker is installed but broken: {error}",
            f"Repair it (its log: {logs}), or remove it, and run the command again.",
        )
