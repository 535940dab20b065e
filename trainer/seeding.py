"""Seeds derived from names, so that every random choice is a function of what it is for and not of what came before.

A run that was killed and goes on makes the same choices as one that was never interrupted, because no random state
has to be carried along: the seed of a response is a hash of (run seed, step, task, sample, turn).
"""

from __future__ import annotations

import hashlib
import random


def derive_seed(*parts: str | int) -> int:
    """63-bit seed from a sequence of names and numbers (BLAKE2b of their text, separated unambiguously)."""
    text = "\x1f".join(str(p) for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def unit_interval(*parts: str | int) -> float:
    """Number in [0, 1) from the same hash: to split a population by name."""
    return derive_seed(*parts) / 2.0**63


def shuffled_numbers(count: int, *parts: str | int) -> list[int]:
    """Return 0 … count - 1 in the order of that seed."""
    numbers = list(range(count))
    random.Random(derive_seed(*parts)).shuffle(numbers)
    return numbers
