"""Package sources that a host has already: parsed as apt reads them, and renamed where they conflict with ours.

apt refuses to work at all when two files name different keys for one repository, that is, one address and suite.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from clusterkit.provision.steps.shell import sha
from clusterkit.provision.steps.step import Refused
from clusterkit.provision.steps.systems import DEB_ARCHITECTURE

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
