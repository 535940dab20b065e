"""Rows that begin alike: found from their token ids, so that what they share is computed once.

The trajectories of a group read the same section at the same turn, and with the section before the memory 75 to 90 % of
their tokens are equal (PrefixGrouper, arXiv 2506.05433). Rows are sorted, which brings those that begin alike together,
and neighbours are compared. Common prefixes of any length make groups; those are taken whose sharing saves most. No
agent has to say what its rows share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trainer.train.microbatches import LEAST_SHARE, LEAST_SHARED, PrefixGroup, without_gc
from trainer.types import Row

Sharers = tuple[list[int], int]
"""Places of sorted rows, and the tokens that they share; one row alone: 0."""


def token_array(row: Row) -> npt.NDArray[np.int32]:
    """Prompt and response [tokens] int32, a view."""
    return np.frombuffer(row.ids, dtype=np.int32)


@without_gc()
def prefix_groups(rows: Sequence[Row], share: bool = True, least_share: float = LEAST_SHARE) -> list[PrefixGroup]:
    """Every row in one group, in the order of the groups' first rows.

    Args:
        rows: of one optimizer step, or of one micro-batch.
        share: False: only rows that are equal altogether are put together, with no prefix.
        least_share: of the rows' mean length; shorter common prefixes bind no rows together. 0 within a micro-batch,
            whose rows are together anyway: what the plan of a step counted once must not be laid down twice.
    """
    if not rows:
        return []
    order = _sorted(rows)
    shared = [_common_prefix(rows[one], rows[other]) for one, other in itertools.pairwise(order)]
    distinct, depths = [[order[0]]], []
    for number, before, depth in zip(order[1:], order, shared, strict=False):
        if _are_equal(rows[before], rows[number], depth):
            distinct[-1].append(number)
        else:
            distinct.append([number])
            depths.append(depth)
    if share:
        sharers = _greedy_groups(depths, [rows[numbers[0]].num_tokens for numbers in distinct], least_share)
    else:
        sharers = [([place], 0) for place in range(len(distinct))]
    return sorted(
        (
            PrefixGroup(prefix, tuple(sorted(tuple(sorted(distinct[place])) for place in places)))
            for places, prefix in sharers
        ),
        key=lambda group: group.rows[0][0],
    )


def _sorted(rows: Sequence[Row]) -> list[int]:
    """Numbers of the rows by token ids (as bytes: any order will do), those of equal ids by the length of the prompt.

    Bytes are compared, not hashed: rows of other documents differ at once, and a step has hundreds of megabytes.
    """
    order = sorted(range(len(rows)), key=lambda number: len(rows[number].prompt_ids))
    return sorted(order, key=lambda number: rows[number].ids)


def _are_equal(one: Row, other: Row, shared: int) -> bool:
    """Whether neighbours that share so many tokens are one computation."""
    prompt = len(one.prompt_ids)
    return shared >= prompt - 1 and prompt == len(other.prompt_ids) and one.ids == other.ids


def _common_prefix(one: Row, other: Row) -> int:
    """Tokens that two rows share, less than either's prompt."""
    most = min(len(one.prompt_ids), len(other.prompt_ids)) - 1
    if most <= 0:
        return 0
    differs = np.frombuffer(one.ids, np.int32, most) != np.frombuffer(other.ids, np.int32, most)
    first = int(differs.argmax())
    return first if differs[first] else most


def _greedy_groups(shared: list[int], lengths: list[int], least_share: float) -> list[Sharers]:
    """Sorted rows in groups that save many tokens; no group of one length of prefixes saves more.

    Runs of rows that all share d tokens form a tree (the intervals of a longest-common-prefix array; Abouelhoda et al.
    2004). Going up, the groups found inside a run either stay as they are, where n rows with a prefix of p tokens save
    (n - 1)·p, or join one group of the run, where each row saves d, less the d of the prefix itself.

    Args:
        shared: tokens that each row shares with the next one.
    """
    open_runs: list[tuple[int, list[Sharers]]] = [(0, [])]  # the tokens that all of a run share, rising, and its groups
    for row, depth in enumerate([*shared, 0]):
        if depth > open_runs[-1][0]:
            open_runs.append((depth, [([row], 0)]))
            continue
        open_runs[-1][1].append(([row], 0))
        while open_runs[-1][0] > depth:
            deeper, inside = open_runs.pop()
            groups = _joined(inside, deeper, lengths, least_share)
            if open_runs[-1][0] < depth:
                open_runs.append((depth, groups))
            else:
                open_runs[-1][1].extend(groups)
    return open_runs[0][1]


def _joined(groups: list[Sharers], depth: int, lengths: list[int], least_share: float) -> list[Sharers]:
    """Groups that all share `depth` tokens, after those have joined that save more as one."""
    if depth < LEAST_SHARED:
        return groups
    gains = [len(rows) * depth - (len(rows) - 1) * prefix for rows, prefix in groups]
    joined = [row for (rows, _), gain in zip(groups, gains, strict=True) if gain > 0 for row in rows]
    worth = sum(gain for gain in gains if gain > 0) > depth
    if not worth or depth * len(joined) < least_share * sum(lengths[row] for row in joined):
        return groups
    return [(joined, depth), *(group for group, gain in zip(groups, gains, strict=True) if gain <= 0)]
