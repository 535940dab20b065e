"""Axes: round ticks, and numbers as short text."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_SPAN = 1e-3
"""An axis spans at least this share of its values: less is rounding, with equal ticks."""

SMALLEST = 1e-300
"""Smaller numbers count as 0: they lose their digits."""


@dataclass(frozen=True)
class Scale:
    """A range of values and the ticks in it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return the place of a value in the range, 0…1."""
        return (value - self.low) / (self.high - self.low)


def scale(low: float, high: float, whole: bool = False, count: int = 5, snug: bool = False) -> Scale:
    """Return a range around low…high with about `count` round ticks.

    Args:
        low: least value.
        high: greatest value.
        whole: ticks are integers.
        count: of ticks, about.
        snug: the range does not extend to the next tick.
    """
    size = max(abs(low), abs(high))
    if size < SMALLEST:
        low, high = low - 1.0, high + 1.0
    elif high - low < LEAST_SPAN * size:
        pad = size * LEAST_SPAN * 10
        low, high = low - pad, high + pad
    step = _round_up((high - low) / count)
    if whole:
        step = max(math.ceil(step), 1)
    if not snug:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return Scale(low, high, tuple(index * step for index in range(first, last + 1)))


def _round_up(value: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(value))
    return next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= value * 0.999)


def short(value: float) -> str:
    """Return a number for an axis or a tooltip: `0.25`, `12.3k`, `1.5e-06`."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, factor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / factor:.5g}{unit}" if size < 1e13 else f"{value:.4g}"
    return f"{value:.5g}" if size >= 1e-3 else f"{value:.4g}"
