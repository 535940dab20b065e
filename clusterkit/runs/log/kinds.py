"""The program that wrote a log, and the error that ends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterkit.runs.log.lines import INFO, WARNING, plain

TRACEBACK = b"Traceback (most recent call last"
MOST_LINES, MOST_BYTES = 400, 1 << 20
"""Limits of a traceback."""
SHOWN_LINES = 8
FOLLOWING_LINES = 50
"""Lines that other processes may write after the error that ended a run."""
ERROR_CHARACTERS = 500

_PREFIX = re.compile(r"^(?:\((?:[^()]{1,120} )?pid=\d+[^)]{0,80}\) ?|\[(?:rank|default)\d+\]: ?)+")
_MESSAGE = re.compile(
    rb"^(?:\([^()\n]{1,120} pid=\d+[^)\n]{0,80}\) ?)?"
    rb"(?:error: |\d{8}-\d\d:\d\d:\d\d\.\d{3} (?:master worker|clusterkit) ERROR: )(.)",
    re.MULTILINE,
)
_STAMP = re.compile(r"\d{8}-\d\d:\d\d:\d\d|error: ")
KINDS: tuple[tuple[str, re.Pattern[bytes]], ...] = tuple(
    (name, re.compile(pattern, re.MULTILINE))
    for name, pattern in (
        ("AReaL or clusterkit", rb"\d{8}-\d\d:\d\d:\d\d\.\d{3}[ \x1b].{0,200}?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL): "),
        ("vLLM", rb"(?:INFO|WARNING|ERROR|DEBUG) \d\d-\d\d \d\d:\d\d:\d\d \[?[\w/.]{1,200}:\d+\]"),
        ("SGLang", rb"server_args=ServerArgs\(|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: (?:DP|TP|PP|EP)\d+)*\] "),
        (
            "Ray",
            rb"raylet|\([^()\n]{1,120} pid=\d+|Autoscaler status|\.(?:py|cc):\d+(?: --|:) |gcs_",
        ),
        ("PyTorch", rb"^\[(?:rank|default)\d+\]|^\[?[IWEF]\d{4,6} \d\d:\d\d:\d\d|torch(?:\.|run)|NCCL (?:INFO|WARN)"),
        ("NVIDIA's tools", rb"NVIDIA-SMI|NVSMI|nvidia_smi_log|^GPU \d+:|\bGPU0\b|NVRM:"),
        ("Linux", rb"\bkernel: |^\[ *\d+\.\d{6}\] |systemd\[\d+\]|slurmstepd|\bsrun: "),
        ("Python", rb"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)[: ]|\d\d:\d\d:\d\d,\d{3} .{0,99}(?:INFO|WARN|ERROR)"),
    )
)
OURS = KINDS[0][0]


@dataclass(frozen=True)
class Traceback:
    """An error as Python prints it."""

    message: str  # its last line
    lines: tuple[str, ...]  # its last lines, with the message
    line: int  # index of the message's line in the text
    ends: bool  # whether it ends the log: few lines follow, and none that a living run writes


def kind_of(text: bytes) -> str:
    """Return the program that wrote a log, by some of its lines; empty if unknown."""
    return next((name for name, pattern in KINDS if pattern.search(text)), "")


def last_traceback(text: bytes) -> Traceback | None:
    """Return the last traceback of a log's text, or None; lines of other processes may stand between its own."""
    head = text.rfind(TRACEBACK)
    if head < 0:
        return None
    begin = text.rfind(b"\n", 0, head) + 1
    lines = text[begin : begin + MOST_BYTES].split(b"\n", MOST_LINES)[:MOST_LINES]
    prefix = ray_prefix(plain(lines[0]))
    found: list[tuple[int, str]] = []
    for index, line in enumerate(lines):
        shown = plain(line[:4000])
        if not shown.startswith(prefix):
            continue  # another process
        shown = shown[len(prefix) :]
        found.append((index, shown.rstrip()))
        if index and shown[:1].strip() and shown[0] != "|":
            break  # the error itself: all lines before it are indented
    while len(found) > 1 and not found[-1][1]:
        found.pop()
    last, message = found[-1]
    end = begin + sum(len(line) + 1 for line in lines[: last + 1])
    goes_on = INFO.search(text, end) is not None or WARNING.search(text, end) is not None
    return Traceback(
        message.strip()[:ERROR_CHARACTERS],
        tuple(item[:ERROR_CHARACTERS] for _, item in found[-SHOWN_LINES:]),
        text.count(b"\n", 0, begin) + last,
        not goes_on and text.count(b"\n", end) <= FOLLOWING_LINES,
    )


def last_message(text: bytes) -> tuple[int, str] | None:
    """Return line index and text of the error of our trainer, AReaL's master or a command of ours that ends a log."""
    found = None
    for found in _MESSAGE.finditer(text):  # noqa: B007 (the last one counts)
        pass
    if found is None or INFO.search(text, found.end()) or WARNING.search(text, found.end()):
        return None
    lines = [plain(line) for line in text[found.start(1) : found.start(1) + 8 * ERROR_CHARACTERS].split(b"\n")]
    count = next((n for n, line in enumerate(lines) if n and (not line.strip() or _STAMP.match(line))), len(lines))
    return text.count(b"\n", 0, found.start()), "\n".join(lines[: min(count, SHOWN_LINES)])


def ray_prefix(line: str) -> str:
    """Return what Ray or torchrun wrote before a line of one process; empty if nothing."""
    match = _PREFIX.match(line)
    return match[0] if match else ""
