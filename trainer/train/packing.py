"""Packing: the rows of a micro-batch as one row of tensors, common prefixes once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.train.layout import PackedLayout, to_device
from trainer.train.prefixes import prefix_groups, token_array
from trainer.types import Row


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
