"""Packing: rows of unequal length into micro-batches under a token budget, the same number on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.train.layout import PackedLayout, to_device
from trainer.train.prefixes import PrefixGroup, prefix_groups, token_array, without_gc
from trainer.types import Row

T = TypeVar("T")

KEYS_PER_TOKEN = 8
"""Most keys and values that attention reads in a micro-batch, per token of its budget. Those of a prefix are copied for
each row that follows it, so they count once a row.
"""
FINER = (1, 2, 4, 8)
"""Numbers of parts that a rank's mean load is cut into, tried in this order. More parts balance the ranks better, but
repeat more prefixes.
"""
EVEN = 1.02
"""Load of the busiest rank over the mean that is accepted without trying finer parts."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch as a single packed row of T tokens.

    Rows with equal ids are packed once. A prefix that rows share is packed once, followed by the rest of each row.
    U is the number of distinct trained tokens, M the number of trained tokens over all rows.
    """

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, position of each token within its row
    layout: PackedLayout  # where prefixes and rows lie in the packed row
    loss_index: Tensor  # [U] int64, positions whose next token is trained on
    targets: Tensor  # [U] int64, those next tokens
    expand: Tensor  # [M] int64, index into the U of every trained token, row by row; the fields below have this order
    behave_logprobs: Tensor  # [M] float32, the engine's
    old_logprobs: Tensor  # [M] float32, the trainer's before the step; the engine's where the row has none
    lacks_old: Tensor  # [M] bool, whether the row has no old_logprobs
    ref_logprobs: Tensor  # [M] float32, the reference's; 0 without one
    advantages: Tensor  # [M] float32
    weights: Tensor  # [M] float32, see `Row.weight`
    sequence: Tensor  # [M] int64, number of the row within this micro-batch


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
    for finer in FINER if ranks > 1 else (1,):
        # Of one rank nothing is to be balanced; a group that fits stays whole.
        limit = max(longest, min(budget, -(-mean // finer)) if ranks > 1 else budget)
        parts = [part for group in whole for part in _split(group, lengths, limit)]
        shares = _balanced(parts, [part.cost for part in parts], ranks)
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
    whole = [lengths[same[0]] for same in group.rows]
    distinct = group.prefix + sum(whole) - group.prefix * len(whole)
    return max(distinct, -(-(sum(whole) + group.prefix) // KEYS_PER_TOKEN))


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


def pack(rows: list[Row], device: torch.device, share: bool = True, multiple: int = 1) -> PackedBatch:
    """Pack rows into one row, common prefixes once.

    Without rows the batch is one token of weight 0, so that its forward and backward pass still take place.

    Args:
        share: whether common prefixes are packed once.
        multiple: of which the number of tokens is to be one; the row is filled up at its end.
    """
    if not rows:
        rows = [Row([0], [0], [0.0], advantage=0.0, weight=0.0, trajectory=-1)]
    segments = _Segments()
    first_target = np.zeros(len(rows), dtype=np.int64)
    targets = 0
    for group in prefix_groups(rows, share, least_share=0):
        head = -1
        if group.prefix:
            head = segments.add(token_array(rows[group.rows[0][0]])[: group.prefix])
        for same in group.rows:
            row = rows[same[0]]
            first_target[list(same)] = targets
            targets += len(row.response_ids)
            # The last token predicts nothing that is trained on. It stays, so that the ids are those that were sampled.
            segments.add(token_array(row)[group.prefix :], head, len(row.response_ids))
    segments.fill_up(multiple)
    counts = [len(row.response_ids) for row in rows]

    def floats(values: Iterable[Sequence[float]]) -> Tensor:
        return _on(np.concatenate([np.asarray(part, dtype=np.float32) for part in values]), device)

    def per_token(values: npt.ArrayLike, dtype: npt.DTypeLike) -> Tensor:
        return _on(np.repeat(np.asarray(values, dtype=dtype), counts), device)

    within = np.concatenate([np.arange(count) for count in counts])
    return PackedBatch(
        input_ids=_on(np.concatenate(segments.ids).astype(np.int64), device)[None],
        position_ids=_on(np.concatenate(segments.positions), device)[None],
        layout=PackedLayout.of(segments.lengths, device, segments.prefixes if share else None),
        loss_index=_on(np.concatenate(segments.loss_index), device),
        targets=_on(np.concatenate(segments.targets).astype(np.int64), device),
        expand=_on(np.repeat(first_target, counts) + within, device),
        behave_logprobs=floats(row.behave_logprobs for row in rows),
        old_logprobs=floats(row.behave_logprobs if row.old_logprobs is None else row.old_logprobs for row in rows),
        lacks_old=per_token([row.old_logprobs is None for row in rows], np.bool_),
        ref_logprobs=floats(
            [0.0] * len(row.response_ids) if row.ref_logprobs is None else row.ref_logprobs for row in rows
        ),
        advantages=per_token([row.advantage for row in rows], np.float32),
        weights=per_token([row.weight for row in rows], np.float32),
        sequence=per_token(range(len(rows)), np.int64),
    )


class _Segments:
    """Collects the segments of a packed row: prefixes, and what follows them."""

    def __init__(self) -> None:
        self.ids: list[npt.NDArray[np.int32]] = []
        self.positions: list[npt.NDArray[np.int64]] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.loss_index: list[npt.NDArray[np.int64]] = []
        self.targets: list[npt.NDArray[np.int32]] = []
        self._end = 0

    def add(self, ids: npt.NDArray[np.int32], prefix: int = -1, trained: int = 0) -> int:
        """Append a segment.

        Args:
            prefix: number of the segment that it continues; -1 for none.
            trained: how many of its last tokens are a response; each is predicted by the token before it.

        Returns:
            Its number.
        """
        before = self.lengths[prefix] if prefix >= 0 else 0
        self._end += len(ids)
        self.ids.append(ids)
        self.positions.append(np.arange(before, before + len(ids)))
        self.lengths.append(len(ids))
        self.prefixes.append(prefix)
        self.loss_index.append(np.arange(self._end - trained - 1, self._end - 1))
        self.targets.append(ids[len(ids) - trained :])
        return len(self.lengths) - 1

    def fill_up(self, multiple: int) -> None:
        """Append a segment of token 0, of which nothing is trained, up to a multiple of tokens.

        Its positions go on, so that a model's own forward pass sees one conversation, whose tokens look back only.
        """
        if lacking := -self._end % multiple:
            after = int(self.positions[-1][-1]) + 1
            self.add(np.zeros(lacking, dtype=np.int32))
            self.positions[-1] += after


def _on(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(values), device)
