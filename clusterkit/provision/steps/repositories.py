"""Package repositories of Docker and NVIDIA on a host: signing key, repository file, conflicting files of others."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import apt, aptsources, dnf
from clusterkit.provision.steps.shell import (
    differs,
    fetch_key,
    restore_mode,
    restore_secret_mode,
    secret_mode,
    write_file,
)
from clusterkit.provision.steps.step import Action
from clusterkit.provision.steps.systems import DEB, RPM

DOCKER, NVIDIA = "Docker", "NVIDIA"
_KEYS = {DEB: "/etc/apt/keyrings/clusterkit-{}.asc", RPM: "/etc/pki/rpm-gpg/clusterkit-{}.asc"}
_FILES = {DEB: "/etc/apt/sources.list.d/clusterkit-{}.sources", RPM: "/etc/yum.repos.d/clusterkit-{}.repo"}

FILES = tuple(path.format(maker.lower()) for maker in (DOCKER, NVIDIA) for path in (*_KEYS.values(), *_FILES.values()))
"""All keys and repository files that we may have written to a host."""


@dataclass(frozen=True)
class Repository:
    """One repository, for apt or dnf."""

    maker: str
    product: str
    family: str
    base: str  # address of the packages
    key_url: str
    fingerprint: str  # of the signing key's primary key
    suite: str = "/"  # apt's
    components: str = ""  # apt's
    signed: str = "packages"  # what the maker signs for dnf: packages or metadata

    @property
    def key(self) -> str:
        """Path of the signing key on a host."""
        return _KEYS[self.family].format(self.maker.lower())

    @property
    def path(self) -> str:
        """Path of the repository file on a host."""
        return _FILES[self.family].format(self.maker.lower())

    @property
    def content(self) -> bytes:
        """Text of the repository file."""
        if self.family == DEB:
            return apt.source(self.base, self.suite, self.components, self.key).encode()
        return dnf.repository(f"clusterkit-{self.maker.lower()}", self.product, self.base, self.key, signed=self.signed)


def add(repository: Repository, facts: Facts) -> tuple[Action, ...]:
    """Return the actions that fetch and verify the key and write the file, as far as either is missing.

    Raises:
        Refused: one file of apt's names this repository together with others.
    """
    one = repository
    actions = []
    outdated = differs(facts, one.path, one.content)
    if one.key not in facts.files or outdated:
        fetch = fetch_key(one.key_url, one.key, one.fingerprint)
        actions.append(Action(f"fetch and verify {one.maker}'s signing key", fetch, timeout=300.0, retries=2))
    if outdated:
        sources = facts.apt_sources if one.family == DEB else {}
        others = aptsources.conflicting_files(one.maker, one.base, one.suite, sources)
        title = f"add {one.maker}'s package repository ({one.path})"
        if others:
            title += f"; rename {', '.join(others)} to *.disabled, which names the same repository"
        before = aptsources.disable_script(others)
        actions.append(write_file(title, one.path, one.content, mode=secret_mode(one.content), before=before))
    return tuple(actions)


def restore_modes(repository: Repository, facts: Facts) -> tuple[Action, ...]:
    """Return the actions that give key and file their modes again, should somebody have changed them."""
    one = repository
    return (
        *restore_mode(facts, f"{one.maker}'s signing key", one.key),
        *restore_secret_mode(facts, f"{one.maker}'s package repository", one.path, one.content),
    )
