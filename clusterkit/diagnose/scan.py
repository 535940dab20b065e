"""Find signatures in logs: only their ends are read, colour and Ray's prefixes are taken off, long lines are cut."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from clusterkit.diagnose.model import Evidence, Hit, Signature
from clusterkit.diagnose.phases import PhaseTracker, phase_of_traceback
from clusterkit.diagnose.present import Present
from clusterkit.diagnose.signatures import SIGNATURES

READ_BYTES = 32 * 1024 * 1024
"""What went wrong stands at the end of a log."""
LINE_CHARACTERS = 4000
SHOWN_CHARACTERS = 300
TRACEBACK_LINES = 200

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\((?:[^()]{1,120} )?pid=\d+[^)]{0,80}\) ?")
_REPEATED = re.compile(r"\s*\[repeated (\d+)x across cluster\].*$")
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_SUSPECT = re.compile(
    r"error|fail|memory|exception|timeout|timed out|nccl|cuda|gloo|xid|pending|died|dead|killed|no space|quota|"
    r"read-only|stale|exceed|longer|maximum context|mismatch|insufficient|too old|in use|sigquit|raylet|gcs|ray inst|"
    r"nvidia|no gpu|device|shm|clients|placement|resource|git-lfs|header|metadata|unfinished|does not fit|settings|"
    r"checkpoint|stuck|too many|endpoint|socket|actor",
    re.IGNORECASE,
)
"""A line without any of these words is known to no signature; a test holds that."""


@dataclass(frozen=True)
class Scan:
    """What was found in one file. skipped_bytes: how much of its beginning was not read."""

    source: str
    hits: list[Hit]
    present: Present
    last_phase: str
    last_line: Evidence | None
    skipped_bytes: int


def scan_file(path: Path, since: str = "", read_bytes: int = READ_BYTES) -> Scan:
    """Read a log's end. since: lines that begin with an earlier time stamp (`20250222-11:11:56`) are passed over.

    Raises:
        OSError: it cannot be read.

    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        skipped = max(size - read_bytes, 0)
        first = 1
        if skipped:
            first += _count_lines(path, skipped)
        file.seek(skipped)
        lines = (raw[: 4 * LINE_CHARACTERS].decode("utf-8", errors="replace") for raw in file)
        return scan_lines(lines, str(path), since, first, skipped)


def scan_lines(lines: Iterable[str], source: str, since: str = "", first: int = 1, skipped: int = 0) -> Scan:
    """Find signatures in lines of text."""
    tracker, present = PhaseTracker(), Present()
    recent: deque[str] = deque(maxlen=TRACEBACK_LINES)
    hits: list[Hit] = []
    old = False
    last: Evidence | None = None
    for number, line in enumerate(lines, first):
        text = plain(line)
        if since:
            stamp = _STAMP.match(text)
            # What follows on a line without a stamp (a traceback) belongs to it.
            old = stamp[0] < since if stamp else old
            if old:
                continue
        if _TRACEBACK.search(text):
            recent.clear()
        recent.append(text)
        if text.strip():
            last = Evidence(source, number, text.strip()[:SHOWN_CHARACTERS])
        tracker.see(text)
        present.see(text)
        if not _SUSPECT.search(text):
            continue
        for signature in known(text):
            traced = phase_of_traceback(recent) if len(recent) > 1 and _TRACEBACK.search(recent[0]) else ""
            evidence = Evidence(source, number, text.strip()[:SHOWN_CHARACTERS])
            hits.append(Hit(signature, evidence, traced or tracker.phase, text, bool(traced)))
    return Scan(source, hits, present, tracker.phase, last, skipped)


def known(text: str) -> Iterator[Signature]:
    """Signatures that know a line."""
    if _any_pattern().search(text):
        yield from (signature for signature, pattern in _compiled() if pattern.search(text))


def plain(line: str) -> str:
    """A line without colour, Ray's prefix and its note of repetitions."""
    text = _ANSI.sub("", line[:LINE_CHARACTERS]) if "\x1b" in line else line[:LINE_CHARACTERS]
    text = text.rstrip("\r\n")
    if text.startswith("("):
        text = _PREFIX.sub("", text)
    return _REPEATED.sub("", text) if "repeated" in text else text


_STAMP = re.compile(r"\d{8}-\d\d:\d\d:\d\d")


@cache
def _compiled() -> tuple[tuple[Signature, re.Pattern[str]], ...]:
    return tuple((signature, re.compile("|".join(f"(?:{p})" for p in signature.patterns))) for signature in SIGNATURES)


@cache
def _any_pattern() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{p})" for signature in SIGNATURES for p in signature.patterns))


def _count_lines(path: Path, end: int) -> int:
    count = 0
    with path.open("rb") as file:
        while end > 0:
            block = file.read(min(end, 1 << 20))
            if not block:
                break
            count += block.count(b"\n")
            end -= len(block)
    return count
