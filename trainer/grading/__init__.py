"""Whether an answer is right, and why: extraction, mathematical comparison in processes that can be killed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and the reason in a few words."""

    right: bool
    reason: str
