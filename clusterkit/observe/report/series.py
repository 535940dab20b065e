"""Values of a number over the steps, averaged so that drawing costs the same for a run of any length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 1000
"""Points of a line: a plot is 400 to 1400 pixels wide, and a page of two long runs stays below 2 MB."""


@dataclass(frozen=True)
class Series:
    """One number over the steps. Each point is the mean, least and greatest value of the steps `first` to `last`."""

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    non_finite: tuple[int, ...] = ()  # steps whose value is no finite number

    @property
    def thinned(self) -> bool:
        """Whether a point is the mean of several steps."""
        return self.first != self.last


def bucket_width(steps: Iterable[int]) -> int:
    """Return the steps per point with which a line has at most MOST_POINTS."""
    known = list(steps)
    if not known:
        return 1
    return -(-(max(known) - min(known) + 1) // MOST_POINTS)


@dataclass(slots=True)
class _Bucket:
    first: int
    last: int
    sum: float
    count: int
    low: float
    high: float


class Numbers:
    """Numbers by name with `width` steps per point; a value that is added costs no look at those before it."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._buckets: dict[str, dict[int, _Bucket]] = {}
        self._non_finite: dict[str, list[int]] = {}

    def add(self, name: str, step: int, value: Any) -> None:
        """Add the value of a step.

        Args:
            step: the training step; steps may come in any order.
            value: None and booleans are skipped; what is no finite number (JSON has "nan" and "inf" as text) is
                listed in `non_finite`.
        """
        if value is None or isinstance(value, bool):
            return
        if not isinstance(value, int | float) or value - value != 0:
            self._non_finite.setdefault(name, []).append(step)
            return
        # Buckets begin at multiples of the width, so those of several runs cover the same steps.
        buckets = self._buckets.setdefault(name, {})
        known = buckets.get((step - 1) // self.width)
        if known is None:
            buckets[(step - 1) // self.width] = _Bucket(step, step, float(value), 1, float(value), float(value))
            return
        known.first, known.last = min(known.first, step), max(known.last, step)
        known.sum, known.count = known.sum + value, known.count + 1
        known.low, known.high = min(known.low, value), max(known.high, value)

    def names(self, prefix: str) -> set[str]:
        """Return the names that begin with `prefix`."""
        return {name for name in self._buckets if name.startswith(prefix)}

    def series(self) -> dict[str, Series]:
        """Return all numbers that have a value."""
        names = dict.fromkeys((*self._buckets, *self._non_finite))
        return {name: self._series(name) for name in names}

    def _series(self, name: str) -> Series:
        buckets = self._buckets.get(name, {})
        parts = [buckets[key] for key in sorted(buckets)]
        return Series(
            first=tuple(part.first for part in parts),
            last=tuple(part.last for part in parts),
            mean=tuple(part.sum / part.count for part in parts),
            low=tuple(part.low for part in parts),
            high=tuple(part.high for part in parts),
            non_finite=tuple(self._non_finite.get(name, ())),
        )
