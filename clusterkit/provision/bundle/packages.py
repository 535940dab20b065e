"""Fetch the package sets of a bundle with the package manager's own tools and a separate configuration.

Package lists, installed packages and settings of this machine are ignored, so a set is complete for a bare host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from clusterkit.provision.bundle.folder import Say, digest
from clusterkit.provision.steps import apt, dnf, docker, packages, shell, toolkit
from clusterkit.provision.steps.systems import ARCHITECTURE, DEB, DEB_ARCHITECTURE, System
from trainer.errors import RunError, UserError

MIRRORS = {"debian": "http://deb.debian.org/debian", "ubuntu": "http://archive.ubuntu.com/ubuntu"}
RPM_MIRRORS = {
    "rocky": "https://dl.rockylinux.org/pub/rocky/{version}",
    "almalinux": "https://repo.almalinux.org/almalinux/{version}",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where packages come from."""

    docker_source: str = "auto"  # auto and docker: Docker's own packages
    docker_url: str = docker.DOCKER_URL
    nvidia_url: str = "https://nvidia.github.io/libnvidia-container"
    apt_mirror: str = ""
    rpm_mirror: str = ""
    gpus: bool = True  # NVIDIA Container Toolkit too


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One run of a package manager: `names` and their dependencies go to `target`."""

    system: System
    target: Path
    work: Path
    sources: Sources
    repositories: Mapping[str, bytes]  # files of Docker's and NVIDIA's repositories, by name
    names: list[str]
    say: Say


def package_sets(system: System, sources: Sources) -> dict[str, tuple[str, ...]]:
    """Return the names of the packages to install, by set.

    Raises:
        UserError: the distribution has no Docker of its own.
    """
    engine: tuple[str, ...] = docker.DOCKER_PACKAGES
    if sources.docker_source == "distribution":
        engine = docker.distribution_packages(system)
        if not engine:
            raise UserError(f"{system.name} has no Docker Engine of its own: use --docker-source docker")
    sets = {"base": packages.BASE_PACKAGES[system.family], "docker": engine}
    return {**sets, "toolkit": toolkit.pinned(system)} if sources.gpus else sets


def fetch(
    system: System,
    target: Path,
    work: Path,
    sources: Sources,
    sets: Mapping[str, tuple[str, ...]] | None,
    say: Say,
) -> list[Path]:
    """Fill `target` with the packages of all sets, their dependencies, and an index; return its files.

    Args:
        work: folder for package lists and unfinished downloads.
        sets: names of packages by set; None: those of `package_sets`.

    Raises:
        UserError: a tool or a keyring is missing.
        RunError: a repository cannot be reached, lacks a package, or serves another signing key.
    """
    chosen = sets or package_sets(system, sources)
    for folder in (target, work):
        folder.mkdir(parents=True, exist_ok=True)
    extra = _extra_repositories(system, chosen, sources, work)
    names = sorted({name for group in chosen.values() for name in group})
    job = _Fetch(system, target, work, sources, extra, names, say)
    files = _fetch_deb(job) if system.family == DEB else _fetch_rpm(job)
    for name, wanted in chosen.items():
        path = target / f"{name}.names"
        path.write_text("".join(f"{package}\n" for package in wanted), encoding="utf-8")
        files.append(path)
    return files


def _extra_repositories(
    system: System, sets: Mapping[str, tuple[str, ...]], sources: Sources, work: Path
) -> dict[str, bytes]:
    """Return the repository files of Docker and NVIDIA that the sets need, by name, with verified keys."""
    found: dict[str, bytes] = {}
    wanted = {name.partition("=")[0] for names in sets.values() for name in names}
    needs = []
    if wanted & set(docker.DOCKER_PACKAGES):
        needs.append(docker.repository(system, sources.docker_url))
    if "toolkit" in sets and sets["toolkit"] == toolkit.pinned(system):
        needs.append(toolkit.repository(system, sources.nvidia_url))
    for one in needs:
        name = one.maker.lower()
        own_key = work / f"{name}.asc"
        _need("gpg", "curl")
        script = f"set -eu\n{shell.fetch_key(one.key_url, str(own_key), one.fingerprint)}"
        _run(["sh", "-c", script], f"{name}'s signing key from {one.key_url}")
        found[name] = one.content.replace(one.key.encode(), str(own_key).encode())
    return found


def _fetch_deb(job: _Fetch) -> list[Path]:
    _need("apt-get", "apt-cache")
    apt_get, target, name = _Apt(job), job.target, job.system.name
    job.say(f"{name}: reading package lists")
    apt_get.run("apt-get", "update", "--error-on=any")
    # Lines like: 'http://…/git_2.39-1_amd64.deb' git_1%3a2.39-1_amd64.deb 7256852 SHA256:…
    listed = apt_get.run("apt-get", "install", "--print-uris", *job.names)
    downloads = [line.split()[1] for line in listed.splitlines() if line.startswith("'")]
    stanzas = _stanzas(apt_get, downloads)
    archives = apt_get.archives
    fetched = 0
    for download, stanza in stanzas.items():
        kept = target / Path(stanza["Filename"]).name
        # apt does not fetch what lies in its archive folder, and checks no more than the size there.
        if _is_right(archives / download, stanza):
            continue
        (archives / download).unlink(missing_ok=True)
        if _is_right(kept, stanza):
            os.link(kept, archives / download)
        else:
            fetched += 1
    size = sum(int(stanza["Size"]) for stanza in stanzas.values())
    job.say(f"{name}: {len(stanzas)} packages, {size / 1e6:.0f} MB ({fetched} to fetch)")
    apt_get.run("apt-get", "install", "--download-only", *job.names)
    files = []
    index = []
    for download, stanza in stanzas.items():
        path = target / Path(stanza["Filename"]).name
        (archives / download).replace(path)
        if not _is_right(path, stanza):
            path.unlink(missing_ok=True)
            raise RunError(f"{path.name} arrived damaged; run the command again")
        files.append(path)
        index.append(stanza["text"].replace(f"Filename: {stanza['Filename']}", f"Filename: ./{path.name}"))
    (target / "Packages").write_text("\n\n".join(index) + "\n", encoding="utf-8")
    for path in target.glob("*.deb"):
        if path not in files:
            path.unlink()
    return [*files, target / "Packages"]


def _is_right(path: Path, stanza: Mapping[str, str]) -> bool:
    record = digest(path)
    return record is not None and record.sha256 == stanza["SHA256"]


class _Apt:
    """apt with folders, sources and settings of its own, and with nothing installed."""

    def __init__(self, job: _Fetch) -> None:
        system, mirror = job.system, job.sources.apt_mirror or MIRRORS[job.system.id]
        own = {"distribution": apt.mirror_sources(system, mirror), **job.repositories}
        keyring = Path(f"/usr/share/keyrings/{system.id}-archive-keyring.gpg")
        if not keyring.exists():
            package = {"debian": "debian-archive-keyring", "ubuntu": "ubuntu-keyring"}[system.id]
            raise UserError(f"{keyring} is missing: install the package {package} of this machine's distribution")
        work = job.work.resolve()
        self.archives = work / "archives"
        for folder in ("archives/partial", "lists/partial", "parts"):
            (work / folder).mkdir(parents=True, exist_ok=True)
        for name, content in own.items():
            (work / "parts" / f"{name}.sources").write_bytes(content)
        (work / "status").write_bytes(b"")
        settings = {
            "Dir::Etc::main": "/dev/null",
            "Dir::Etc::parts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": f"{work}/parts",
            "Dir::Etc::trusted": "/dev/null",
            "Dir::Etc::trustedparts": "/dev/null",
            "Dir::State": str(work),
            "Dir::State::lists": f"{work}/lists",
            "Dir::State::status": f"{work}/status",
            "Dir::Cache": str(work),
            "Dir::Cache::archives": str(self.archives),
            "APT::Architecture": DEB_ARCHITECTURE,
            "APT::Architectures": DEB_ARCHITECTURE,
            "APT::Install-Recommends": "false",
            "APT::Get::Assume-Yes": "true",
            # Else apt asks for root, or drops to a user who may not write here.
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        configuration = work / "apt.conf"
        configuration.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()), encoding="utf-8")
        self._environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C"}

    def run(self, *command: str) -> str:
        """Run apt-get or apt-cache and return its output."""
        return _run([*command[:1], "-q", *command[1:]], " ".join(command[:2]), self._environment)


def _stanzas(apt_get: _Apt, downloads: list[str]) -> dict[str, dict[str, str]]:
    """Return the index entries by file name in apt's archive: their fields, and the whole entry as `text`."""
    wanted = {}
    for download in downloads:
        name, version, _ = unquote(download).rsplit("_", 2)
        wanted[name, version] = download
    shown = apt_get.run("apt-cache", "show", *(f"{name}={version}" for name, version in wanted))
    stanzas = {}
    for text in shown.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and not line.startswith(" "))
        found = wanted.get((fields.get("Package", ""), fields.get("Version", "")))
        if found is not None:
            stanzas[found] = {**fields, "text": text}
    missing = [download for download in downloads if download not in stanzas]
    if missing:
        raise RunError(f"the package lists have no entry for {', '.join(missing[:5])}; run the command again")
    return stanzas


def _fetch_rpm(job: _Fetch) -> list[Path]:
    _need("dnf", "createrepo_c")
    system, target, work = job.system, job.target, job.work.resolve()
    mirror = job.sources.rpm_mirror or RPM_MIRRORS.get(system.id, "").format(version=system.version)
    if not mirror:
        raise UserError(
            f"packages of {system.name} come with a subscription: name your mirror of them (--rpm-mirror URL, the "
            "folder that holds BaseOS and AppStream)"
        )
    repositories = work / "repos"
    for folder in (repositories, work / "root", work / "cache"):
        folder.mkdir(parents=True, exist_ok=True)
    for part in ("BaseOS", "AppStream"):
        base = f"{mirror.rstrip('/')}/{part}/{ARCHITECTURE}/os/"
        (repositories / f"{part}.repo").write_bytes(
            dnf.repository(f"clusterkit-{part}", part, base, "/dev/null", signed="")
        )
    for name, content in job.repositories.items():
        (repositories / f"{name}.repo").write_bytes(content)
    job.say(f"{system.name}: fetching packages")
    (work / "dnf.conf").write_text("[main]\n", encoding="utf-8")
    options = {
        "reposdir": repositories,
        "cachedir": work / "cache",
        "install_weak_deps": False,
        "varsdir": work,
        "pluginpath": work,
        "keepcache": False,
    }
    command = ["dnf", "-q", "-y", f"--config={work}/dnf.conf", f"--installroot={work}/root"]
    command += [f"--releasever={system.version}", f"--forcearch={ARCHITECTURE}"]
    command += [f"--setopt={key}={value}" for key, value in options.items()]
    command += ["install", "--downloadonly", f"--downloaddir={target.resolve()}", *job.names]
    _run(command, "dnf install --downloadonly")
    _run(["createrepo_c", "--quiet", "--update", str(target)], "createrepo_c")
    return [*sorted(target.glob("*.rpm")), *sorted((target / "repodata").iterdir())]


def _need(*commands: str) -> None:
    for command in commands:
        if shutil.which(command) is None:
            raise UserError(
                f"{command} is not installed here; it is needed for this bundle. Install it (Debian and Ubuntu have "
                "apt-get, dnf, createrepo-c, gnupg and curl as packages), or build the bundle on a machine that has it"
            )


def _run(command: list[str], what: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3600, check=False, env=environment, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()[-8:]
        raise RunError(f"{what} failed:\n" + "\n".join(f"  {line}" for line in lines))
    return done.stdout
