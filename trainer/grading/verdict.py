"""What a comparison of answers comes to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and the reason in a few words."""

    right: bool
    reason: str
