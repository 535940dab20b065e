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
"""Into how many parts the largest group is divided, tried beside as many as there are ranks for it, and beside parts of
the mean load over 1, 2, 4 and 8. Smaller parts balance the ranks better, but repeat more prefixes.
"""
UNEQUAL = (1.05, 1.1)
"""Parts that are so much longer beyond the prefix are tried, too: rows of other groups may be divided less evenly than
the largest's.
"""
EVEN = 1.02
"""Load of the busiest rank over the mean that is accepted without trying smaller parts. Smaller ones must gain as much:
they may need more micro-batches.
"""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows whose first `prefix` tokens are equal and computed once; 0 for a row that shares nothing.

    The last token of a prompt predicts the first of the response, so `prefix` is less than the prompt of any member.

    rows: numbers of the rows, those with the same prompt and response in one tuple: they are one computation.
    """

    prefix: int
    rows: tuple[tuple[int, ...], ...]


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
    whole = [_part(part, lengths) for group in groups for part in _without_long(group, lengths, budget)]
    mean = -(-sum(part.tokens for part in whole) // ranks)
    best: tuple[int, list[list[Part]]] | None = None
    for limit in _limits(whole, lengths, ranks, budget):
        parts = [part for group in whole for part in _split(group, lengths, limit, budget)]
        tokens = [part.tokens for part in parts]
        if best is not None and sum(tokens) >= best[0] * ranks:
            break  # still smaller parts repeat still more
        shares = _balanced(parts, tokens, ranks)
        most = max(sum(part.tokens for part in share) for share in shares)
        if best is None or EVEN * most < best[0]:
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


def distinct_tokens(
    plan: Sequence[Sequence[Sequence[int]]], groups: Sequence[PrefixGroup], lengths: Sequence[int]
) -> list[int]:
    """Tokens that each rank computes by a plan, see `share_out`: a prefix once in a micro-batch, equal rows once."""
    place = {row: number for number, group in enumerate(groups) for same in group.rows for row in same}
    first = {row: same[0] for group in groups for same in group.rows for row in same}

    def tokens(batch: Sequence[int]) -> int:
        prefixes = sum(groups[number].prefix for number in {place[row] for row in batch})
        return prefixes + sum(lengths[row] - groups[place[row]].prefix for row in {first[row] for row in batch})

    return [sum(map(tokens, batches)) for batches in plan]


def beyond_budget(
    plan: Sequence[Sequence[Sequence[int]]], groups: Sequence[PrefixGroup], lengths: Sequence[int], budget: int
) -> tuple[int, int]:
    """What a larger budget would save.

    Returns:
        Tokens that a plan computes again because groups have no room in a micro-batch; the least budget in which all
        groups have, or all that a rank computes.
    """
    room = max((room_for(group, lengths) for group in groups if group.prefix), default=0)
    if room <= budget:
        return 0, room
    roomy = distinct_tokens(share_out(groups, lengths, len(plan), room), groups, lengths)
    again = sum(distinct_tokens(plan, groups, lengths)) - sum(roomy)
    return max(0, again), max(budget, min(room, max(roomy)))


def _limits(groups: Sequence[Part], lengths: Sequence[int], ranks: int, budget: int) -> list[int]:
    """Most tokens of a part, one after another to be tried, falling; the first divides no group that fits."""
    if ranks == 1 or not groups:
        return [budget]
    mean = -(-sum(part.tokens for part in groups) // ranks)
    group = max(groups, key=lambda part: part.tokens).group
    beyond = sorted((lengths[same[0]] - group.prefix for same in group.rows), reverse=True)
    counts = {min(parts, len(beyond)) for parts in (*PARTS, -(-ranks // len(groups)))}
    found = {group.prefix + max(map(sum, _balanced(beyond, beyond, count))) for count in counts}
    found |= {group.prefix + math.ceil(slack * (limit - group.prefix)) for limit in found for slack in UNEQUAL}
    found |= {-(-mean // finer) for finer in (1, 2, 4, 8)}
    rows = (lengths[same[0]] for part in groups for same in part.group.rows)
    longest = max((length for length in rows if length <= budget), default=0)
    return sorted({max(longest, min(budget, limit)) for limit in found}, reverse=True)


def _without_long(group: PrefixGroup, lengths: Sequence[int], budget: int) -> list[PrefixGroup]:
    """A group without its rows that are longer than a micro-batch, and these one by one."""
    long = [same for same in group.rows if lengths[same[0]] > budget]
    if not long:
        return [group]
    rest = tuple(same for same in group.rows if lengths[same[0]] <= budget)
    kept = [PrefixGroup(group.prefix if len(rest) > 1 else 0, rest)] if rest else []
    return [*kept, *(PrefixGroup(0, (same,)) for same in long)]


class Part(NamedTuple):
    """A group of rows or a part of one.

    tokens: that are computed, the prefix once. cost: tokens of a micro-batch's budget, these or the keys over
    KEYS_PER_TOKEN if that is more.
    """

    group: PrefixGroup
    tokens: int
    cost: int


def room_for(group: PrefixGroup, lengths: Sequence[int]) -> int:
    """Least budget of a micro-batch that a group has room in, in tokens."""
    return _part(group, lengths).cost


def _part(group: PrefixGroup, lengths: Sequence[int]) -> Part:
    rows = sum(lengths[same[0]] for same in group.rows)
    distinct = group.prefix + rows - group.prefix * len(group.rows)
    return Part(group, distinct, max(distinct, -(-(rows + group.prefix) // KEYS_PER_TOKEN)))


def _split(whole: Part, lengths: Sequence[int], limit: int, budget: int) -> list[Part]:
    """Split a group into as few parts as possible that have at most `limit` tokens each and room in a micro-batch.

    limit: at most `budget`. A row that is longer stays alone.
    """

    def fits(part: Part) -> bool:
        return part.tokens <= limit and part.cost <= budget

    group = whole.group
    if fits(whole) or len(group.rows) == 1:
        return [whole]
    rows = sorted(group.rows, key=lambda same: (-lengths[same[0]], same))
    beyond = [lengths[same[0]] - group.prefix for same in rows]
    count = max(-(-sum(beyond) // max(1, limit - group.prefix)), -(-whole.cost // budget), 2)
    # Where not even the two shortest rows fit together no row shares anything.
    while count < len(rows) and group.prefix + sum(beyond[-2:]) <= limit:
        parts = [
            _part(PrefixGroup(group.prefix, tuple(sorted(part))), lengths) for part in _balanced(rows, beyond, count)
        ]
        if all(map(fits, parts)):
            return parts
        count += max(1, count // 8)
    return [_part(PrefixGroup(0, (same,)), lengths) for same in group.rows]


def _balanced(items: Sequence[T], costs: Sequence[int], bins: int) -> list[list[T]]:
    """Distribute items over bins: the costliest first, each into the bin with the least load (Graham 1969, LPT)."""
    found: list[list[T]] = [[] for _ in range(bins)]
    load = [(0, number) for number in range(bins)]  # a heap
    for i in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        held, least = load[0]
        found[least].append(items[i])
        heapq.heapreplace(load, (held + costs[i], least))
    return found
