"""The course of a number over the steps, thinned so that a run of any length draws at one cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.runs.log.metrics import Record, number

MOST_POINTS = 300
"""Points of a line: a plot is some 400 to 1200 pixels wide, and a page of two long runs stays below 2 MB."""


@dataclass(frozen=True)
class Series:
    """One number over the steps. Each point stands for the steps `first` to `last`: mean, least and greatest value.

    odd: steps whose value was no finite number.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    odd: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.first or self.odd)

    @property
    def thinned(self) -> bool:
        """Whether a point stands for several steps."""
        return self.first != self.last


def bucket_width(steps: Iterable[int]) -> int:
    """How many steps a point stands for, so that there are at most MOST_POINTS of them."""
    known = list(steps)
    if not known:
        return 1
    return -(-(max(known) - min(known) + 1) // MOST_POINTS)


def course(records: Sequence[Record], value: Callable[[Record], Any], width: int) -> Series:
    """The course of `value` over records with a `global_step`, `width` steps a point.

    A value that is None is left out; one that is no finite number (JSON has "nan" and "inf" as text) is told in `odd`.
    """
    buckets: dict[int, list[tuple[int, float]]] = {}
    odd = []
    for record in records:
        step, found = int(number(record, "global_step") or 0), value(record)
        if found is None or isinstance(found, bool):
            continue
        if not isinstance(found, int | float) or found - found != 0:
            odd.append(step)
            continue
        # Buckets begin at multiples of the width, so that those of two runs lie over each other.
        buckets.setdefault((step - 1) // width, []).append((step, float(found)))
    parts = [buckets[key] for key in sorted(buckets)]
    values = [[value for _, value in part] for part in parts]
    return Series(
        first=tuple(min(step for step, _ in part) for part in parts),
        last=tuple(max(step for step, _ in part) for part in parts),
        mean=tuple(sum(part) / len(part) for part in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
        odd=tuple(odd),
    )
