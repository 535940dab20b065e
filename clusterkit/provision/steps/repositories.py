"""Package repositories of Docker and NVIDIA on a host: signing key, repository file, conflicting files of others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from clusterkit.provision.facts.model import Facts
from clusterkit.provision.steps import apt, dnf
from clusterkit.provision.steps.shell import (
    differs,
    fetch_key,
    restore_mode,
    restore_secret_mode,
    secret_mode,
    sha,
    write_file,
)
from clusterkit.provision.steps.step import Action, Refused
from clusterkit.provision.steps.systems import DEB, DEB_ARCHITECTURE, RPM

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
        others = conflicting_files(one.maker, one.base, one.suite, sources)
        title = f"add {one.maker}'s package repository ({one.path})"
        if others:
            title += f"; rename {', '.join(others)} to *.disabled, which names the same repository"
        before = disable_script(others)
        actions.append(write_file(title, one.path, one.content, mode=secret_mode(one.content), before=before))
    return tuple(actions)


def restore_modes(repository: Repository, facts: Facts) -> tuple[Action, ...]:
    """Return the actions that give key and file their modes again, should somebody have changed them."""
    one = repository
    return (
        *restore_mode(facts, f"{one.maker}'s signing key", one.key),
        *restore_secret_mode(facts, f"{one.maker}'s package repository", one.path, one.content),
    )


_ONE_LINE = re.compile(r"^\s*deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?(?P<uri>[^\s#]+)\s+(?P<suite>[^\s#]+)")
_OURS = "/clusterkit-"


def repositories(path: str, text: str) -> set[tuple[str, str]]:
    """Return (address, suite) of every repository that a .list or .sources file enables.

    sources.list(5): lines `deb [options] ADDRESS SUITE COMPONENT…`, or paragraphs of fields (deb822).
    """
    found = _paragraphs(text) if path.endswith(".sources") else _lines(text)
    return {(_address(uri), suite.replace("$(ARCH)", DEB_ARCHITECTURE)) for uri, suite in found}


def conflicting_files(maker: str, uri: str, suite: str, sources: Mapping[str, str]) -> dict[str, str]:
    """Return other people's files (path: text) that name a repository which we are about to add, and nothing else.

    Args:
        maker: of the packages, for the message.
        sources: texts of apt's files by path.

    Raises:
        Refused: a file names the repository together with others, so it cannot be renamed.
    """
    wanted, found = (_address(uri), suite), {}
    for path, text in sorted(sources.items()):
        named = repositories(path, text)
        if _OURS in path or wanted not in named:
            continue
        if named != {wanted}:
            raise Refused(
                f"{path} names {maker}'s repository ({_shown(uri)} {suite}) beside others, and apt takes no second key "
                "for one repository",
                "Nothing was changed. Move that entry into a file of its own, which clusterkit then sets aside, or "
                "disable it (# before its line, or `Enabled: no` in its paragraph), and run the command again.",
            )
        found[path] = text
    return found


def disable_script(files: Mapping[str, str]) -> str:
    """Return a script that renames files to *.disabled. It stops at a file whose text (by path) has changed."""
    return "".join(
        f"""file={shlex.quote(path)}
text=$(grep -v '^[[:space:]]*#' "$file")
sum=$(printf '%s' "$text" | sha256sum)
if [ "$sum" != '{sha(text.encode())}  -' ]; then
  echo "$file was changed by somebody else meanwhile; run the command again" >&2
  exit 1
fi
aside=$file.disabled
if [ -e "$aside" ]; then
  now=$(date +%s)
  aside=$file.$now.disabled
fi
mv "$file" "$aside"
echo "renamed $file to $aside: it names the repository that clusterkit sets up"
"""
        for path, text in files.items()
    )


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if found := _ONE_LINE.match(line):
            yield found["uri"], found["suite"]


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line.lstrip().startswith("#"):
                continue
            if line[:1] in " \t":
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            else:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "without", "off", "disable", "0"):
            continue
        for uri in fields.get("uris", "").split():
            yield from ((uri, suite) for suite in fields.get("suites", "").split())


def _address(uri: str) -> str:
    return uri.replace("$(ARCH)", DEB_ARCHITECTURE).rstrip("/")


def _shown(uri: str) -> str:
    """Return the address without a user and password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
