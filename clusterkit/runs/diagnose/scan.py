"""Find signatures in the end of a log, in lines without colours and Ray's prefixes, cut where they are long.

Regular expressions are slow on megabytes. So a search for plain words chooses the lines that they are tried on.
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

from clusterkit.runs.diagnose.logged_settings import SETTING_WORDS, LoggedSettings
from clusterkit.runs.diagnose.model import Evidence, Hit, Signature
from clusterkit.runs.diagnose.phases import MARK_WORDS, PhaseTracker, phase_of_traceback
from clusterkit.runs.diagnose.signatures import SIGNATURES
from clusterkit.runs.log.kinds import last_message, last_traceback, ray_prefix
from clusterkit.runs.log.lines import plain as without_colours

READ_BYTES = 8 * 1024 * 1024
"""Errors stand at the end of a log; so much takes half a second."""
COUNTED_BYTES = 256 * 1024 * 1024
"""Lines before that are counted up to here, so that evidence has line numbers; a sixth of a second."""
LINE_CHARACTERS = 4000
SHOWN_CHARACTERS = 300
TRACEBACK_LINES = 200
REPLAYED_MARKS = 50
"""Requests and answers of a step or two; they can overlap."""

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
"""Every message that matches a signature contains one of these; a test generates messages and checks it."""

_STAMP = re.compile(rb"\d{8}-\d\d:\d\d:\d\d")
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Scan:
    """What was found in one file."""

    source: str
    hits: list[Hit]
    logged: LoggedSettings  # settings that the log prints
    last_phase: str  # phase of the step at the end of the log
    last_line: Evidence | None  # the last line that is not empty
    skipped_bytes: int  # size of the beginning that was not read
    error: Evidence | None = None  # the last lines of the last traceback
    fatal: bool = False  # whether the file ends with that traceback
    message: Evidence | None = None  # the error of AReaL's master or of a command of ours that ends the log


def scan_file(path: Path, since: str = "", read_bytes: int = READ_BYTES) -> Scan:
    """Scan a log's end.

    Args:
        since: a time stamp (`20250222-11:11:56`); lines that begin with an earlier one are skipped.
        read_bytes: size of the end that is read.

    Raises:
        OSError: the log cannot be read.
    """
    with path.open("rb") as file:
        skipped = max(file.seek(0, 2) - read_bytes, 0)
        file.seek(skipped)
        scan = scan_bytes(file.read(read_bytes), str(path), since, skipped=skipped)
        if not skipped:
            return scan
        # Lines are not counted if there is no evidence to number, or the log is very long.
        counted = bool(scan.hits or scan.error or scan.message) and skipped <= COUNTED_BYTES
        return shift_lines(scan, _newlines(file, skipped) if counted else None)


def _newlines(file: BinaryIO, end: int) -> int:
    file.seek(0)
    return sum(file.read(min(1 << 20, end - start)).count(b"\n") for start in range(0, end, 1 << 20))


def shift_lines(scan: Scan, lines: int | None) -> Scan:
    """Return the scan with line numbers counted from `lines` lines further up; None: that number is unknown."""

    def move(item: Evidence) -> Evidence:
        return replace(item, line=0 if lines is None else item.line + lines)

    hits = [replace(hit, evidence=move(hit.evidence)) for hit in scan.hits]
    last_line, error, message = (item and move(item) for item in (scan.last_line, scan.error, scan.message))
    return replace(scan, hits=hits, last_line=last_line, error=error, message=message)


def scan_bytes(data: bytes, source: str, since: str = "", skipped: int = 0) -> Scan:
    """Scan a piece of a log; `skipped`: bytes before it. Line numbers count from its beginning."""
    lines = data.split(b"\n")
    begin = _first_since(lines, since.encode()) if since else 0
    ends = list(accumulate(len(line) + 1 for line in lines))
    marks, logged = _containing(MARK_WORDS, data, ends), LoggedSettings()
    for index in _containing(SETTING_WORDS, data, ends):
        logged.read_line(plain(lines[index]))
    hits: list[Hit] = []
    for index in _containing(WORDS, data, ends):
        text = plain(lines[index])
        signatures = tuple(matching_signatures(text)) if index >= begin else ()
        if not signatures:
            continue
        traceback_phase = phase_of_traceback(_traceback(lines, max(index - TRACEBACK_LINES, begin), index))
        phase = traceback_phase or _phase(lines, marks, begin, index)
        evidence = Evidence(source, 1 + index, text.strip()[:SHOWN_CHARACTERS])
        hits += [Hit(signature, evidence, phase, text, bool(traceback_phase)) for signature in signatures]
    last = next((i for i in range(len(lines) - 1, begin - 1, -1) if lines[i].strip()), None)
    last_line = None
    if last is not None:
        last_line = Evidence(source, 1 + last, plain(lines[last]).strip()[:SHOWN_CHARACTERS])
    own = data[ends[begin - 1] :] if begin else data
    error, message = last_traceback(own), last_message(own)
    return Scan(
        source,
        hits,
        logged,
        _phase(lines, marks, begin, len(lines)),
        last_line,
        skipped,
        None if error is None else Evidence(source, 1 + begin + error.line, "\n".join(error.lines)),
        error is not None and error.ends,
        None if message is None else Evidence(source, 1 + begin + message[0], message[1]),
    )


def matching_signatures(text: str) -> Iterator[Signature]:
    """Yield the signatures that match a line."""
    yield from (signature for signature, pattern in _compiled() if pattern.search(text))


def plain(line: bytes) -> str:
    """Return a line without colours, Ray's prefix and its note about repetitions, cut to LINE_CHARACTERS."""
    text = without_colours(line[: 4 * LINE_CHARACTERS])[:LINE_CHARACTERS]
    return text[len(ray_prefix(text)) :] if text.startswith("(") else text


def _containing(words: Sequence[str], data: bytes, ends: Sequence[int]) -> list[int]:
    """Return the indexes of the lines that contain one of some words, in order. `ends`: where each line ends."""
    found: set[int] = set()
    for word in words:
        needle = word.encode()
        position = data.find(needle)
        while position >= 0:
            index = bisect_right(ends, position)
            found.add(index)
            position = data.find(needle, ends[index])
    return sorted(found)


def _phase(lines: Sequence[bytes], marks: Sequence[int], begin: int, index: int) -> str:
    """Return the phase at a line, by the marks before it."""
    tracker = PhaseTracker()
    place = bisect_right(marks, index)
    for mark in marks[max(place - REPLAYED_MARKS, 0) : place]:
        if mark >= begin:
            tracker.read_line(plain(lines[mark]))
    return tracker.phase


def _traceback(lines: Sequence[bytes], begin: int, index: int) -> list[str]:
    """Return the lines of the traceback that ends at a line; none if there is no traceback."""
    texts: list[str] = []
    for line in reversed(lines[begin:index]):
        text = plain(line)
        if _TRACEBACK in text:
            return texts
        if text and not text[0].isspace():
            # A traceback has only indented lines between its head and its error.
            return []
        texts.append(text)
    return []


def _first_since(lines: Sequence[bytes], since: bytes) -> int:
    """Return the index of the first line with a time stamp of `since` or later."""
    for index, line in enumerate(lines):
        if _STAMP.match(line) and line[: len(since)] >= since:
            return index
    return len(lines)


@cache
def _compiled() -> tuple[tuple[Signature, re.Pattern[str]], ...]:
    return tuple((signature, re.compile("|".join(f"(?:{p})" for p in signature.patterns))) for signature in SIGNATURES)
