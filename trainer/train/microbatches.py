"""Rows into micro-batches of a token budget, the same number on every rank, by their lengths and what they share.

Needs neither PyTorch nor NumPy: `clusterkit presets plan` divides the rows that a run would have as the run does.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LEAST_SHARED = 16
"""Tokens. A shorter common prefix, such as a chat template's first words, saves less than its bookkeeping costs."""
LEAST_SHARE = 1 / 16
"""Of its rows' mean length: a system prompt before long rows is not worth binding all rows of a step together."""
KEYS_PER_TOKEN = 8
"""Most keys and values that attention reads in a micro-batch, per token of its budget. Those of a prefix are copied for
each row that follows it, so they count once a row.
"""
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Into how many parts the costliest group is divided, tried in this order. More parts balance the ranks better, but
repeat more prefixes.
"""
UNEQUAL = 1.1
"""How much longer than their mean the parts of a group may be beyond its prefix: rows are not divided."""
EVEN = 1.02
"""Load of the busiest rank over the mean that is accepted without trying more parts."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first `prefix` tokens are equal and computed once; 0 for a row that shares nothing.

    The last token of a prompt predicts the first of the response, so `prefix` is less than the prompt of any member.

    rows: numbers of the rows, those with the same prompt and response in one tuple: they are one computation.
    """

    prefix: int
    rows: tuple[tuple[int, ...], ...]

    def distinct(self, lengths: Sequence[int]) -> int:
        """Tokens, the prefix once. lengths: of every row, by its number."""
        return self.prefix + sum(lengths[same[0]] - self.prefix for same in self.rows)


@contextmanager
def without_gc() -> Iterator[None]:
    """Python looks for no cycles meanwhile: it would visit every number of a step's lists, a second for 80 million."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """Bins of row numbers whose lengths sum to at most `budget` tokens (first-fit decreasing; deterministic).

    A row that is longer than the budget is alone in its bin.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[i]
        for b, free in enumerate(room):
            if length <= free:
                bins[b].append(i)
                room[b] -= length
                break
        else:
            bins.append([i])
            room.append(budget - length)
    return bins


@without_gc()
def share_out(groups: Sequence[PrefixGroup], lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Divide rows into micro-batches for every rank.

    A group of rows with a common prefix stays in one micro-batch where the ranks' loads are balanced so. Otherwise it
    is split, and each part computes the prefix again. Parts go to the rank with the fewest tokens, the largest first.
    Every rank gets the same number of micro-batches, some of them empty, because all ranks must enter FSDP's
    collectives equally often.

    Args:
        lengths: tokens of every row, by the row's number.
        budget: most distinct tokens of a micro-batch, but for one row that is longer, and alone in it.

    Returns:
        Row numbers as [rank][micro-batch][row].
    """
    groups = [part for group in groups for part in _without_long(group, lengths, budget)]
    fitting = (lengths[same[0]] for group in groups for same in group.rows if lengths[same[0]] <= budget)
    longest = max(fitting, default=0)
    whole = [Part(group, _cost(group, lengths)) for group in groups]
    mean = -(-sum(part.cost for part in whole) // ranks)
    best: tuple[int, list[list[Part]]] | None = None
    for limit in _limits(whole, longest, budget)[: None if ranks > 1 else 1]:  # of one rank nothing is to be balanced
        parts = [part for group in whole for part in _split(group, lengths, limit)]
        costs = [part.cost for part in parts]
        if best is not None and sum(costs) >= best[0] * ranks:
            break  # still more parts repeat still more
        shares = _balanced(parts, costs, ranks)
        most = max(sum(part.cost for part in share) for share in shares)
        if best is None or most < best[0]:
            best = most, shares
        if best[0] <= EVEN * mean:
            break
    assert best is not None
    plans = [
        [
            [number for place in packed for same in share[place].group.rows for number in same]
            for packed in first_fit_decreasing([part.cost for part in share], budget)
        ]
        for share in best[1]
    ]
    batches = max(1, *map(len, plans))
    return [plan + [[] for _ in range(batches - len(plan))] for plan in plans]


def _limits(groups: Sequence[Part], longest: int, budget: int) -> list[int]:
    """Most that a part of a group may cost, as many as there are to try; the first divides no group that fits."""
    group, cost = max(groups, key=lambda part: part.cost, default=Part(PrefixGroup(0, ()), 0))
    beyond = cost - group.prefix
    found = (group.prefix + math.ceil(UNEQUAL * beyond / parts) for parts in PARTS)
    return list(dict.fromkeys(max(longest, min(budget, limit)) for limit in found))


def _without_long(group: PrefixGroup, lengths: Sequence[int], budget: int) -> list[PrefixGroup]:
    """A group without its rows that are longer than a micro-batch, and these one by one."""
    long = [same for same in group.rows if lengths[same[0]] > budget]
    if not long:
        return [group]
    rest = tuple(same for same in group.rows if lengths[same[0]] <= budget)
    kept = [PrefixGroup(group.prefix if len(rest) > 1 else 0, rest)] if rest else []
    return [*kept, *(PrefixGroup(0, (same,)) for same in long)]


class Part(NamedTuple):
    """A group of rows or a part of one, and its cost in tokens (see `_cost`)."""

    group: PrefixGroup
    cost: int


def _cost(group: PrefixGroup, lengths: Sequence[int]) -> int:
    """Tokens of its budget that a group uses: its distinct tokens, or its keys over KEYS_PER_TOKEN if that is more."""
    keys = sum(lengths[same[0]] for same in group.rows) + group.prefix
    return max(group.distinct(lengths), -(-keys // KEYS_PER_TOKEN))


def _split(whole: Part, lengths: Sequence[int], limit: int) -> list[Part]:
    """Split a group into as few parts as possible that cost at most `limit` each; a row that costs more stays alone."""
    group, cost = whole
    if cost <= limit or len(group.rows) == 1:
        return [whole]
    rows = sorted(group.rows, key=lambda same: (-lengths[same[0]], same))
    costs = [lengths[same[0]] - group.prefix for same in rows]
    count = -(-cost // limit)
    # Where not even the two shortest rows fit together no row shares anything.
    while count < len(rows) and group.prefix + sum(costs[-2:]) <= limit:
        found = [PrefixGroup(group.prefix, tuple(sorted(part))) for part in _balanced(rows, costs, count)]
        parts = [Part(part, _cost(part, lengths)) for part in found]
        if all(part.cost <= limit for part in parts):
            return parts
        count += max(1, count // 8)
    alone = [PrefixGroup(0, (same,)) for same in group.rows]
    return [Part(part, _cost(part, lengths)) for part in alone]


def _balanced(items: Sequence[T], costs: Sequence[int], bins: int) -> list[list[T]]:
    """Distribute items over bins: the costliest first, each into the bin with the least load (Graham 1969, LPT)."""
    found: list[list[T]] = [[] for _ in range(bins)]
    load = [(0, number) for number in range(bins)]  # a heap
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        held, least = load[0]
        found[least].append(items[i])
        heapq.heapreplace(load, (held + costs[i], least))
    return found
