"""Packing: rows of unequal length into micro-batches under a token budget, the same number on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import UserError
from trainer.train.attention import PackedLayout, to_device
from trainer.types import Row


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One micro-batch as a single packed row.

    Rows of equal ids are laid down once. input_ids, position_ids: [1, T] int64. layout: where the distinct rows lie.
    loss_index, targets: [U] int64, positions whose next token is trained on, and those tokens. expand: [M] int64, for
    every trained token of every row its place among the U; everything below is [M] in the same order:
    behave_logprobs, old_logprobs (the engine's where the row has none), ref_logprobs (zeros without a reference),
    advantages, weights float32; lacks_old bool, whether the row has none; sequence int64 (number of the row within
    this batch). num_rows: rows.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout
    loss_index: Tensor
    targets: Tensor
    expand: Tensor
    behave_logprobs: Tensor
    old_logprobs: Tensor
    lacks_old: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    num_rows: int


def first_fit_decreasing(lengths: list[int], budget: int) -> list[list[int]]:
    """Bins of row numbers whose lengths sum to at most `budget` tokens (first-fit decreasing; deterministic).

    Raises:
        UserError: a single row is longer than the budget.

    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[i]
        if length > budget:
            raise UserError(
                f"a conversation has {length} tokens and train.max_tokens_per_mb is {budget}: raise it to at least that"
            )
        for b, free in enumerate(room):
            if length <= free:
                bins[b].append(i)
                room[b] -= length
                break
        else:
            bins.append([i])
            room.append(budget - length)
    return bins


def share_out(lengths: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Micro-batches for every rank: [rank][micro-batch] -> row numbers.

    Rows go to the rank with the fewest tokens, longest first; every rank gets the same number of micro-batches, the
    missing ones empty, because FSDP collectives must be entered by all ranks the same number of times.
    """
    rows_of: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = load.index(min(load))
        rows_of[rank].append(i)
        load[rank] += lengths[i]
    plans = [
        [[rows[j] for j in b] for b in first_fit_decreasing([lengths[i] for i in rows], budget)] for rows in rows_of
    ]
    most = max(1, *map(len, plans))
    return [plan + [[] for _ in range(most - len(plan))] for plan in plans]


def group_identical(rows: list[Row]) -> list[list[int]]:
    """Numbers of the rows that have the same prompt and response ids, in order of first appearance.

    Samples of one task start from the same prompt and often agree: their forward and backward passes are the same
    computation, which is then done once. Each row keeps its own advantage and weight, so the loss is unchanged.
    """
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((tuple(row.prompt_ids), tuple(row.response_ids)), []).append(number)
    return list(groups.values())


def pack(rows: list[Row], device: torch.device) -> PackedBatch:
    """Lay rows end to end. No rows: one token of weight 0, so that the forward and backward passes still happen."""
    if not rows:
        rows = [Row([0], [0], [0.0], advantage=0.0, weight=0.0, trajectory=-1)]
    ids: list[int] = []
    positions: list[int] = []
    loss_index: list[int] = []
    targets: list[int] = []
    first_target: dict[int, int] = {}
    distinct = group_identical(rows)
    for members in distinct:
        row = rows[members[0]]
        start = len(ids) + len(row.prompt_ids)
        first_target |= dict.fromkeys(members, len(targets))
        loss_index.extend(range(start - 1, start - 1 + len(row.response_ids)))
        targets.extend(row.response_ids)
        # The last token is never an input whose next token matters, but keeping it keeps ids sent = ids trained on.
        ids.extend(row.prompt_ids)
        ids.extend(row.response_ids)
        positions.extend(range(row.num_tokens))
    expand: list[int] = []
    behave: list[float] = []
    old: list[float] = []
    ref: list[float] = []
    lacks_old: list[bool] = []
    per_token: list[tuple[float, float, int]] = []
    for number, row in enumerate(rows):
        count = len(row.response_ids)
        expand.extend(range(first_target[number], first_target[number] + count))
        behave.extend(row.behave_logprobs)
        lacks_old.extend([row.old_logprobs is None] * count)
        old.extend(row.behave_logprobs if row.old_logprobs is None else row.old_logprobs)
        ref.extend([0.0] * count if row.ref_logprobs is None else row.ref_logprobs)
        per_token.extend([(row.advantage, row.weight, number)] * count)

    def floats(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), device)

    def longs(values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.long), device)

    return PackedBatch(
        input_ids=longs(ids)[None],
        position_ids=longs(positions)[None],
        layout=PackedLayout.of([rows[members[0]].num_tokens for members in distinct], device),
        loss_index=longs(loss_index),
        targets=longs(targets),
        expand=longs(expand),
        behave_logprobs=floats(behave),
        old_logprobs=floats(old),
        lacks_old=to_device(torch.tensor(lacks_old, dtype=torch.bool), device),
        ref_logprobs=floats(ref),
        advantages=floats([a for a, _, _ in per_token]),
        weights=floats([w for _, w, _ in per_token]),
        sequence=longs([s for _, _, s in per_token]),
        num_rows=len(rows),
    )
