"""Reads the text of `ray status`. It is no contract of Ray's, so it is used only where Ray's API does not answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NODE = re.compile(r"^\s*(\d{1,9}) (\S+)\s*$")
_AMOUNT = r"(\d{1,20}(?:\.\d{1,20})?)([A-Za-z]*)"
_USAGE = re.compile(rf"^\s*{_AMOUNT}/{_AMOUNT} (\S+)")
_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, slots=True)
class StatusText:
    """nodes: active; pending, failed: others. used, total: amounts by resource (memory in bytes)."""

    nodes: int
    pending: int
    failed: int
    used: dict[str, float]
    total: dict[str, float]


def parse_status(text: str) -> StatusText | None:
    """Read the text, or return None when it is not what `ray status` prints."""
    if "Node status" not in text:
        return None
    counts = {"Active": 0, "Idle": 0, "Pending": 0, "Recent failures": 0}
    used: dict[str, float] = {}
    total: dict[str, float] = {}
    section = ""
    for line in text.splitlines():
        if line and not line.startswith((" ", "-", "=")):
            section = line.strip().rstrip(":")
        elif section == "Usage" or section.startswith("Total Usage"):
            if match := _USAGE.match(line):
                amount, unit, whole, whole_unit, name = match.groups()
                used[name] = float(amount) * _UNITS.get(unit, 1)
                total[name] = float(whole) * _UNITS.get(whole_unit, 1)
        elif section in counts:
            counts[section] += _count(line)
    return StatusText(counts["Active"] + counts["Idle"], counts["Pending"], counts["Recent failures"], used, total)


def _count(line: str) -> int:
    """Nodes of one line: `1 node_ab12`, `3 worker_type`, or `node_type: reason` and `(no …)` for pending and failed."""
    if match := _NODE.match(line):
        return int(match.group(1))
    text = line.strip()
    return int(bool(text) and not text.startswith("("))
