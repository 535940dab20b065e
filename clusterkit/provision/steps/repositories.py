"""A maker's package repository on a host: its signing key, its file, and files of others that are in its way."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import aptsources
from clusterkit.provision.steps.shell import (
    differs,
    fetch_key,
    put_back_mode,
    put_back_secret_mode,
    secret_mode,
    write_file,
)
from clusterkit.provision.steps.step import Action
from clusterkit.provision.steps.systems import DEB, System


@dataclass(frozen=True)
class Repository:
    """A repository as a file of the package manager, and the key that it is signed with.

    maker: Docker or NVIDIA.
    path: where the file belongs; content: what it holds.
    key: where the signing key belongs; key_url: where it comes from; fingerprint: of its primary key.
    base: address of the packages, and suite: apt's, by which files of others that name the same are found.
    """

    maker: str
    path: str
    content: bytes
    key: str
    key_url: str
    fingerprint: str
    base: str
    suite: str


def add(repository: Repository, system: System, facts: Facts) -> tuple[Action, ...]:
    """Fetch and verify the key and write the file, as far as either is not there.

    Raises:
        Refused: a file of apt's names this repository and others, too.

    """
    one = repository
    actions = []
    wrong = differs(facts, one.path, one.content)
    if one.key not in facts.files or wrong:
        fetch = fetch_key(one.key_url, one.key, one.fingerprint)
        actions.append(Action(f"fetch and verify {one.maker}'s signing key", fetch, timeout=300.0, retries=2))
    if wrong:
        others = (
            aptsources.in_the_way(one.maker, one.base, one.suite, facts.apt_sources) if system.family == DEB else {}
        )
        title = f"add {one.maker}'s package repository ({one.path})" + aptsources.also(others)
        before = aptsources.set_aside(others)
        actions.append(write_file(title, one.path, one.content, mode=secret_mode(one.content), before=before))
    return tuple(actions)


def put_back_modes(repository: Repository, facts: Facts) -> tuple[Action, ...]:
    """Give key and file their modes again, should somebody have changed them."""
    one = repository
    return (
        *put_back_mode(facts, f"{one.maker}'s signing key", one.key),
        *put_back_secret_mode(facts, f"{one.maker}'s package repository", one.path, one.content),
    )
