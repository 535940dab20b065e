"""Choose the lines of a log that are worth parsing, and unwrap their messages.

Logs of several GB are mostly lines of engines, so a search in the raw bytes chooses lines. Both expressions begin with
fixed text on purpose: `re` then uses memchr, several times faster than one search per keyword. benchmarks/runlog.py
compares this with `grep -c` of KEYWORDS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

INFO = re.compile(
    rb"INFO: (?:Epoch |RPC name |Stats \(|Dumped recover|Will recover from|Recovering from|Saved recover checkpoint"
    rb"|Training will start from|Model rpc |Model \S{1,60} saved at |Evaluation |interrupted after step "
    rb"|Experiment Completes|Training completes|\x1b)"
)
WARNING = re.compile(rb"WARNING: (?:Recovering from error|Invalid recover checkpoint|recover checkpoint )")
ERROR = b"ERROR: "

KEYWORDS = (
    *(f"INFO: {word}" for word in ("Epoch ", "RPC name ", "Stats (", "Dumped recover", "Will recover from")),
    *(f"INFO: {word}" for word in ("Recovering from", "Saved recover checkpoint", "Training will start from")),
    *(f"INFO: {word}" for word in ("Model rpc ", "Evaluation ", "interrupted after step ", "Experiment Completes")),
    *("INFO: Training completes", "INFO: \x1b", " saved at ", "WARNING: Recovering from error"),
    *("WARNING: Invalid recover checkpoint", "WARNING: recover checkpoint ", "ERROR: "),
)
"""The same choice as plain words, for grep."""

MAX_MESSAGES = 4
"""A line has one message, or a few if a writer was killed within the line and the next one continued it."""

_MESSAGE = re.compile(r"(INFO|WARNING|ERROR): ")
_ANSI = re.compile(r"\x1b\[[0-9;]{0,40}[A-Za-z]")
_REPEATED = re.compile(r"\[repeated (\d{1,9})x across cluster\]")
_STAMP = re.compile(r"(\d{4})(\d\d)(\d\d)-(\d\d):(\d\d):(\d\d)(?:\.(\d{1,3}))?")
_BEFORE_MESSAGE = 160


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a logger. `time`: Unix seconds, by the local time of this machine; None without a time stamp."""

    level: str
    text: str
    time: float | None
    before: str

    @property
    def by_master(self) -> bool:
        """Whether the master worker wrote it, which leads AReaL v0.2 and v0.3; our trainer writes its name, too."""
        return self.before.endswith("master worker ")


def interesting(block: bytes, end: int) -> list[int]:
    """Return sorted positions within `block[:end]`, each in a line worth parsing."""
    found = [match.start() for match in INFO.finditer(block, 0, end)]
    found += [match.start() for match in WARNING.finditer(block, 0, end)]
    position = block.find(ERROR, 0, end)
    while position >= 0:
        found.append(position)
        position = block.find(ERROR, position + len(ERROR), end)
    found.sort()
    return found


def plain(line: bytes) -> str:
    """Return a line as text, without colours and Ray's note about repetitions."""
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return _REPEATED.sub("", text) if "[repeated " in text else text


def messages(text: str) -> Iterator[Message]:
    """Yield the messages of one plain line, usually one, without the prefixes of Ray and launchers."""
    starts = [(match.start(), match.end(), match[1]) for match in _MESSAGE.finditer(text)][-MAX_MESSAGES:]
    for index, (start, begin, level) in enumerate(starts):
        end = starts[index + 1][0] if index + 1 < len(starts) else len(text)
        before = text[max(start - _BEFORE_MESSAGE, 0) : start]
        yield Message(level, text[begin:end], stamp(before), before)


def stamp(text: str) -> float | None:
    """Return the last time stamp in a text (`20250222-11:11:56.997`) as Unix seconds, or None."""
    found = None
    for found in _STAMP.finditer(text):  # noqa: B007 (the last one counts)
        pass
    if found is None:
        return None
    *parts, fraction = found.groups()
    try:
        whole = datetime(*map(int, parts)).timestamp()  # type: ignore[arg-type]
    except (ValueError, OverflowError, OSError):
        return None
    return whole + (int(fraction.ljust(3, "0")) / 1000 if fraction else 0.0)
