"""Host names as people type them: lists, ranges, user@host:port."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence

from clusterkit.hosts.model import Host
from trainer.errors import UserError

MOST_HOSTS = 1024
"""A range with more hosts is taken for a typing error."""

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\+-]*\$?")
_RANGE = re.compile(r"\[([^\[\]]*)\]")
_RIGHT = "Write hosts as node1, 10.0.0.5, root@node1:2222, [fd00::5]:22, node[01-16] or an alias of ~/.ssh/config"


def parse_hosts(words: Sequence[str]) -> tuple[Host, ...]:
    """Return the hosts that words name: `a b`, `a,b`, `node[01-16]`, `n[1-3,7]`, `user@host:port`, `[::1]:22`.

    The name of a host is its address, or address:port where several hosts have the address.

    Raises:
        UserError: a malformed name or range, a host that is named twice, or no host at all.
    """
    hosts = [parse_host(name) for word in words for name in expand_names(word)]
    if not hosts:
        raise UserError(f"no host is named.\n{_RIGHT}.")
    addresses = [host.target for host in hosts]
    named = [
        host.model_copy(update={"name": with_port(host.target, host.port), "address": host.target})
        if host.port is not None and addresses.count(host.target) > 1
        else host
        for host in hosts
    ]
    names = [host.name for host in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"{', '.join(twice)}: named twice. Name every host once.")
    return tuple(named)


def expand_names(word: str) -> list[str]:
    """Return the words that a list with ranges stands for: `a,n[1-2]` is a, n1, n2. Any words will do."""
    return [name for part in _split(word) for name in _expand(part)]


def parse_host(word: str) -> Host:
    """Return the host that [user@]host[:port] names. Raises UserError where it is malformed."""
    username, at, rest = word.rpartition("@")
    if at and not USER.fullmatch(username):
        raise _wrong(word, f"'{username}' is no user name" if username else "the user name before @ is missing")
    address, port = _address_and_port(word, rest)
    return Host(name=address, username=username or None, port=port)


def _address_and_port(word: str, rest: str) -> tuple[str, int | None]:
    if not rest:
        raise _wrong(word, "the host name is missing")
    if rest.startswith("-"):
        raise _wrong(word, "a host name cannot begin with '-'")
    if "://" in rest:
        raise _wrong(word, "this is a URL")
    if rest.startswith("["):
        address, bracket, tail = rest[1:].partition("]")
        if not bracket or not _is_address(address, 6) or (tail and not tail.startswith(":")):
            raise _wrong(word, f"'{rest}' is no [IPv6 address]:port")
        return address, _port(word, tail[1:]) if tail else None
    if _is_address(rest, 6):
        return rest, None
    address, colon, port = rest.partition(":")
    if not _NAME.fullmatch(address) or len(address) > 253:
        raise _wrong(word, f"'{address}' is no host name" if address else "the host name is missing")
    if re.fullmatch(r"[0-9.]+", address) and not _is_address(address, 4):
        raise _wrong(word, f"'{address}' is no IP address")
    return address, _port(word, port) if colon else None


def _port(word: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise _wrong(word, f"'{text}' is no port (1 to 65535)")
    return int(text)


def _split(word: str) -> Iterator[str]:
    """Split at commas and white space outside of brackets."""
    for part in re.split(r"(?:[,\s])(?![^\[\]]*\])", word):
        if part:
            yield part


def _expand(word: str) -> Iterator[str]:
    """Yield the names that a word with ranges stands for; the leftmost range varies slowest."""
    user, at, rest = word.rpartition("@")
    match = None if re.match(r"\[[0-9A-Fa-f.%\w]*:", rest) else _RANGE.search(rest)
    if match is None:
        if rest.count("[") != rest.count("]"):
            raise _wrong(word, "a bracket has no partner")
        yield word
        return
    budget = MOST_HOSTS
    for value in _values(word, match[1]):
        for name in _expand(user + at + rest[: match.start()] + value + rest[match.end() :]):
            if not budget:
                raise _wrong(word, f"this names more than {MOST_HOSTS} hosts")
            budget -= 1
            yield name


def _values(word: str, ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, dash, last = (text.strip() for text in part.partition("-"))
        if not dash:
            last = first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise _wrong(word, f"'[{ranges}]' is no range: write [1-16], [01-16] or [1-3,7]")
        if int(last) < int(first):
            raise _wrong(word, f"the range {part} runs backwards: write {last}-{first}")
        if int(last) - int(first) >= MOST_HOSTS:
            raise _wrong(word, f"the range {part} names more than {MOST_HOSTS} hosts")
        # Zero-padded as typed: 01-16 is 01, 02 … 16.
        width = len(first) if first.startswith("0") else 0
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{width}d}"


def with_port(address: str, port: int) -> str:
    """Return ADDRESS:PORT, or [ADDRESS]:PORT for IPv6."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_address(text: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(text).version == version
    except ValueError:
        return False


def _wrong(word: str, why: str) -> UserError:
    return UserError(f"'{word}' is no host: {why}.\n{_RIGHT}.")
