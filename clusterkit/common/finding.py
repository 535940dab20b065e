"""A verdict on one matter of one host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """OK: fine, or what setup takes care of. WARN: it works, but look at it. FAIL: the cluster would not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """host: its name, empty for the cluster as a whole. fix: what to do; empty only where nothing is to be done."""

    host: str
    check: str
    level: Level
    message: str
    fix: str = ""

    def as_dict(self) -> dict[str, str]:
        """For --json."""
        return {key: str(value) for key, value in asdict(self).items()}


def worst(findings: Iterable[Finding]) -> Level:
    """The gravest level among them; OK for none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
