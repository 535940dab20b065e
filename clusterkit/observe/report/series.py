"""Values of a number over the steps, averaged so that drawing costs the same for a run of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.runs.log.metrics import Record, whole

MOST_POINTS = 300
"""Points of a line: a plot is 400 to 1200 pixels wide, and a page of two long runs stays below 2 MB."""


@dataclass(frozen=True)
class Series:
    """One number over the steps. Each point is the mean, least and greatest value of the steps `first` to `last`.

    `non_finite`: steps whose value is no finite number.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    non_finite: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.first or self.non_finite)

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


def make_series(records: Sequence[Record], value: Callable[[Record], Any], width: int) -> Series:
    """Collect `value` over records with a `global_step`, `width` steps per point.

    None is skipped. Values that are no finite number (JSON has "nan" and "inf" as text) are listed in `non_finite`.
    """
    buckets: dict[int, list[tuple[int, float]]] = {}
    non_finite: list[int] = []
    for record in records:
        step, found = whole(record, "global_step"), value(record)
        if found is None or isinstance(found, bool):
            continue
        if not isinstance(found, int | float) or found - found != 0:
            non_finite.append(step)
            continue
        # Buckets begin at multiples of the width, so those of two runs cover the same steps.
        buckets.setdefault((step - 1) // width, []).append((step, float(found)))
    parts = [buckets[key] for key in sorted(buckets)]
    values = [[value for _, value in part] for part in parts]
    return Series(
        first=tuple(min(step for step, _ in part) for part in parts),
        last=tuple(max(step for step, _ in part) for part in parts),
        mean=tuple(sum(part) / len(part) for part in values),
        low=tuple(map(min, values)),
        high=tuple(map(max, values)),
        non_finite=tuple(non_finite),
    )
