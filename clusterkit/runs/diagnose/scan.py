"""Find signatures in logs: only their ends are read, colour and Ray's prefixes are taken off, long lines are cut.

Regular expressions are slow on megabytes: first the lines are found that hold a word without which no expression fits.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from clusterkit.runs.diagnose.model import Evidence, Hit, Signature
from clusterkit.runs.diagnose.phases import MARK_WORDS, PhaseTracker, phase_of_traceback
from clusterkit.runs.diagnose.present import PRESENT_WORDS, Present
from clusterkit.runs.diagnose.signatures import SIGNATURES
from clusterkit.runs.log.kinds import last_message, last_traceback

READ_BYTES = 8 * 1024 * 1024
"""What went wrong stands at the end of a log; half a second."""
COUNTED_BYTES = 256 * 1024 * 1024
"""Lines of what comes before are counted up to here, so that a place has its number; a sixth of a second."""
LINE_CHARACTERS = 4000
SHOWN_CHARACTERS = 300
TRACEBACK_LINES = 200
REPLAYED_MARKS = 50
"""Requests and answers of a step or two, which can overlap."""

WORDS = tuple(
    word.strip()
    for word in """
    emory | CUDA_ERROR_ILLEGAL | swap space | KV cache | graph failed | oom-kill | Bus error | /dev/shm |
    ended by signal | ended by SIG | Segmentation fault | Fatal Python error |
    code -9 | code 137 | code: -9 | code: 137 | invalid argument | atchdog | NCCL | nccl |
    socket interface | listening interface | remote process | loo | DistStoreError | for clients | client socket |
    already in use | EADDRINUSE | lacement group | placement group | resource request | node types | marked dead |
    node has died | was terminated | aylet | Version mismatch | GCS | Ray instance | actor died | unexpectedly exits |
    ActorDied | WorkerCrashed | launch failed | sigquit | nitialization failed | hit an exception | exceeds the |
    context length | other settings | does not fit | recover checkpoint | checkpoint path | NVML | version mismatch |
    driver version | NVIDIA driver | CUDA GPUs | CUDA-capable | the NVIDIA | Xid | ECC error | off the bus |
    launch failure | o space left | quota exceeded | rrno | Read-only | file handle | endpoint is not | open files |
    HeaderTooLarge | MetadataIncomplete | InvalidHeader | deserializing | git-lfs | No module | did not come within |
    reach rank 0 | not ready after
    """.split("|")
)
"""Every message that a signature knows holds one of these; a test makes messages of the expressions and looks."""

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIX = re.compile(r"^\((?:[^()]{1,120} )?pid=\d+[^)]{0,80}\) ?")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_STAMP = re.compile(rb"\d{8}-\d\d:\d\d:\d\d")
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Scan:
    """What was found in one file. skipped_bytes: how much of its beginning was not read. error: the last traceback,
    its last lines in one text; fatal: whether the file ends with it. message: what the master or a command of ours
    ended with, where it ends with that.
    """

    source: str
    hits: list[Hit]
    present: Present
    last_phase: str
    last_line: Evidence | None
    skipped_bytes: int
    error: Evidence | None = None
    fatal: bool = False
    message: Evidence | None = None


def scan_file(path: Path, since: str = "", read_bytes: int = READ_BYTES) -> Scan:
    """Read a log's end. since: lines that begin with an earlier time stamp (`20250222-11:11:56`) are passed over.

    Raises:
        OSError: it cannot be read.

    """
    with path.open("rb") as file:
        skipped = max(file.seek(0, 2) - read_bytes, 0)
        file.seek(skipped)
        scan = scan_bytes(file.read(read_bytes), str(path), since, skipped=skipped)
        if not skipped:
            return scan
        # Where nothing is to be pointed at, and in a very long log, what comes before its end is not even counted.
        counted = bool(scan.hits or scan.error or scan.message) and skipped <= COUNTED_BYTES
        return moved(scan, _newlines(file, skipped) if counted else None)


def _newlines(file: BinaryIO, end: int) -> int:
    file.seek(0)
    return sum(file.read(min(1 << 20, end - start)).count(b"\n") for start in range(0, end, 1 << 20))


def moved(scan: Scan, lines: int | None) -> Scan:
    """A scan of a log's end with its places counted from the log's first line; None: how many lines is not known."""

    def move(item: Evidence) -> Evidence:
        return replace(item, line=0 if lines is None else item.line + lines)

    hits = [replace(hit, evidence=move(hit.evidence)) for hit in scan.hits]
    last_line, error, message = (item and move(item) for item in (scan.last_line, scan.error, scan.message))
    return replace(scan, hits=hits, last_line=last_line, error=error, message=message)


def scan_bytes(data: bytes, source: str, since: str = "", first: int = 1, skipped: int = 0) -> Scan:
    """Find signatures in a piece of a log that begins with line `first`."""
    lines = data.split(b"\n")
    begin = _first_since(lines, since.encode()) if since else 0
    ends = list(accumulate(len(line) + 1 for line in lines))
    marks, present = _holding(MARK_WORDS, data, ends), Present()
    for index in _holding(PRESENT_WORDS, data, ends):
        present.see(plain(lines[index]))
    hits: list[Hit] = []
    for index in _holding(WORDS, data, ends):
        text = plain(lines[index])
        signatures = tuple(known(text)) if index >= begin else ()
        if not signatures:
            continue
        traced = phase_of_traceback(_traceback(lines, max(index - TRACEBACK_LINES, begin), index))
        phase = traced or _phase(lines, marks, begin, index)
        evidence = Evidence(source, first + index, text.strip()[:SHOWN_CHARACTERS])
        hits += [Hit(signature, evidence, phase, text, bool(traced)) for signature in signatures]
    last = next((i for i in range(len(lines) - 1, begin - 1, -1) if lines[i].strip()), None)
    last_line = None
    if last is not None:
        last_line = Evidence(source, first + last, plain(lines[last]).strip()[:SHOWN_CHARACTERS])
    own = data[ends[begin - 1] :] if begin else data
    error, message = last_traceback(own), last_message(own)
    return Scan(
        source,
        hits,
        present,
        _phase(lines, marks, begin, len(lines)),
        last_line,
        skipped,
        None if error is None else Evidence(source, first + begin + error.line, "\n".join(error.lines)),
        error is not None and error.ends,
        None if message is None else Evidence(source, first + begin + message[0], message[1]),
    )


def known(text: str) -> Iterator[Signature]:
    """Signatures that know a line."""
    yield from (signature for signature, pattern in _compiled() if pattern.search(text))


def plain(line: bytes) -> str:
    """A line without colour, Ray's prefix and its note of repetitions."""
    text = line[: 4 * LINE_CHARACTERS].decode("utf-8", errors="replace")[:LINE_CHARACTERS].rstrip("\r")
    text = _ANSI.sub("", text) if "\x1b" in text else text
    text = _PREFIX.sub("", text) if text.startswith("(") else text
    return _REPEATED.sub("", text) if "repeated" in text else text


def _holding(words: Sequence[str], data: bytes, ends: Sequence[int]) -> list[int]:
    """Indexes of the lines that hold one of some words, in order. ends: where each line ends."""
    found: set[int] = set()
    for word in words:
        wanted = word.encode()
        position = data.find(wanted)
        while position >= 0:
            index = bisect_right(ends, position)
            found.add(index)
            position = data.find(wanted, ends[index])
    return sorted(found)


def _phase(lines: Sequence[bytes], marks: Sequence[int], begin: int, index: int) -> str:
    """The phase at a line, of the marks before it."""
    tracker = PhaseTracker()
    place = bisect_right(marks, index)
    for mark in marks[max(place - REPLAYED_MARKS, 0) : place]:
        if mark >= begin:
            tracker.see(plain(lines[mark]))
    return tracker.phase


def _traceback(lines: Sequence[bytes], begin: int, index: int) -> list[str]:
    """The lines of the traceback that ends at a line, empty where none does."""
    texts: list[str] = []
    for line in reversed(lines[begin:index]):
        text = plain(line)
        if _TRACEBACK in text:
            return texts
        if text and not text[0].isspace():
            # Only indented lines lie between a traceback's head and its error.
            return []
        texts.append(text)
    return []


def _first_since(lines: Sequence[bytes], since: bytes) -> int:
    """Index of the first line with a time stamp of `since` or later."""
    for index, line in enumerate(lines):
        if _STAMP.match(line) and line[: len(since)] >= since:
            return index
    return len(lines)


@cache
def _compiled() -> tuple[tuple[Signature, re.Pattern[str]], ...]:
    return tuple((signature, re.compile("|".join(f"(?:{p})" for p in signature.patterns))) for signature in SIGNATURES)
