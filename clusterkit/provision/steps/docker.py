"""Docker Engine: left alone where one answers, started where one is installed, else installed as wished."""

from __future__ import annotations

import re

from clusterkit.hosts.model import Host
from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import apt, dnf, dockerd_scripts, repositories
from clusterkit.provision.steps.packages import install_action
from clusterkit.provision.steps.repositories import Repository
from clusterkit.provision.steps.step import Action, DesiredState, Refused
from clusterkit.provision.steps.systems import DEB, System, has_systemd, system_of

DOCKER_URL = "https://download.docker.com"
OLDEST = (20, 10)  # the first that runs containers on cgroup v2

KEYS = {
    "deb": ("/etc/apt/keyrings/clusterkit-docker.asc", "9DC858229FC7DD38854AE2D88D81803C0EBFCD88"),
    "rpm": ("/etc/pki/rpm-gpg/clusterkit-docker.asc", "060A61C51B558A7F742B77AAC52FEB6B621E9F35"),
}
REPOSITORIES = {
    "deb": "/etc/apt/sources.list.d/clusterkit-docker.sources",
    "rpm": "/etc/yum.repos.d/clusterkit-docker.repo",
}
DOCKER_PACKAGES = ("docker-ce", "docker-ce-cli", "containerd.io", "docker-buildx-plugin")
# The distribution's engine. Debian 13 keeps the docker command in a package of its own; elsewhere docker.io has it.
DISTRIBUTION_PACKAGES = {"debian-13": ("docker.io", "docker-cli")}
# Parts of the distribution that Docker's own packages push out, and whatever runs on them with them.
IN_THE_WAY = (
    "containerd",
    "runc",
    "docker.io",
    "docker-cli",
    "docker-buildx",
    "podman-docker",
    "docker",
    "docker-engine",
)

_NOT_RUNNING = re.compile(
    r"cannot connect to the docker daemon|failed to connect to the docker api|is the docker daemon running"
    r"|connection refused|no such file or directory",
    re.IGNORECASE,
)


class DockerStep:
    """Docker Engine installed and answering."""

    name = "docker"

    def plan(self, host: Host, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:  # noqa: ARG002
        """Nothing, a start, or an installation.

        Raises:
            Refused: the engine is too old or broken, it comes from a snap, Podman poses as it, or packages of the
                distribution that others may be using are in the way.

        """
        system = system_of(facts)
        docker = facts.docker
        _refuse_impostors(system, facts)
        modes = repositories.put_back_modes(repository(system, wish.docker_url), facts)
        if docker.server:
            if _version(docker.server) < OLDEST:
                raise Refused(
                    f"Docker {docker.server} is too old; {OLDEST[0]}.{OLDEST[1]} or newer is needed",
                    "Upgrade it (that stops its containers, so clusterkit does not do it), then run the command again.",
                )
            return modes
        start = Action("start Docker", dockerd_scripts.start(has_systemd(facts)), timeout=180.0)
        if "dockerd" in facts.commands:
            _refuse_broken(facts)
            return (*modes, start)
        return (*modes, *_install(system, facts, wish), start)


def source_of(system: System, facts: Facts, wish: DesiredState) -> str:
    """Where Docker is to come from: `docker`, `distribution` or `bundle`.

    `auto` is Docker's own repository, but the distribution's package where its containerd or runc is installed already
    (Docker's would replace them under whoever uses them), and where packages come from a mirror of the distribution
    while no mirror of Docker's was named.
    """
    if wish.bundle:
        return "bundle"
    if wish.docker_source == "auto":
        if system.family != DEB:
            return "docker"
        mirrored = bool(wish.apt_mirror) and wish.docker_url == DOCKER_URL
        return "distribution" if mirrored or {"containerd", "runc"} & facts.packages.keys() else "docker"
    return wish.docker_source


def distribution_packages(system: System) -> tuple[str, ...]:
    """Names of the distribution's own engine; empty where it has none."""
    return DISTRIBUTION_PACKAGES.get(system.name, ("docker.io",)) if system.family == DEB else ()


def repository(system: System, url: str) -> Repository:
    """Docker's repository, or a mirror of it."""
    url, (key, fingerprint) = url.rstrip("/"), KEYS[system.family]
    if system.family == DEB:
        base = f"{url}/linux/{system.id}"
        content = apt.source(base, system.codename, "stable", key).encode()
    else:
        # One repository for RHEL and what is built from it. Not $releasever: it may hold the minor release.
        base = f"{url}/linux/rhel"
        content = dnf.repository(
            "clusterkit-docker", "Docker Engine", f"{base}/{system.version}/$basearch/stable", key, signed="packages"
        )
    path = REPOSITORIES[system.family]
    return Repository("Docker", path, content, key, f"{base}/gpg", fingerprint, base, system.codename)


def _install(system: System, facts: Facts, wish: DesiredState) -> tuple[Action, ...]:
    source = source_of(system, facts, wish)
    if source == "bundle":
        return (install_action(system, wish, (), title="install Docker Engine", bundled="docker"),)
    if source == "distribution":
        packages = distribution_packages(system)
        if not packages:
            raise Refused(
                f"{system.name} has no Docker Engine of its own",
                "Use Docker's repository (--docker-source docker), or a mirror of it (--docker-url).",
            )
        return (install_action(system, wish, packages),)
    blocking = sorted(facts.packages.keys() & set(IN_THE_WAY))
    if blocking:
        remove = "apt-get remove" if system.family == DEB else "dnf remove"
        other = "use the distribution's Docker (--docker-source distribution), or " if system.family == DEB else ""
        raise Refused(
            f"{', '.join(blocking)} of the distribution is installed; Docker's packages would replace it and stop "
            "whatever runs on it",
            f"If nothing else needs it, remove it (`{remove} {' '.join(blocking)}`); else {other}"
            "install a Docker Engine yourself: one that answers is left as it is.",
        )
    return (
        *repositories.add(repository(system, wish.docker_url), system, facts),
        install_action(system, wish, DOCKER_PACKAGES),
    )


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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
