"""The result of one check of one host or of a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """OK: fine, or setup will mend it. WARN: it works, but look at it. FAIL: it would not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    host: str  # its name; empty for a cluster as a whole
    check: str
    level: Level
    message: str
    fix: str = ""  # what to do; empty only if there is nothing to do

    def as_dict(self) -> dict[str, str]:
        """Return the shape of --json."""
        return {key: str(value) for key, value in asdict(self).items()}


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level; OK if there are no findings."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
