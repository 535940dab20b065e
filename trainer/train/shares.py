"""Rows on their way to the ranks: each is sent those that it computes, as flat arrays, and nothing of the others'.

Rank 0 has the rows of a step and plans every pass over them (`trainer.train.microbatches`). In the field's words this
is a scatter; broadcasting all rows as Python objects costs every rank 46 bytes a token and the time to make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.train.distributed import World
from trainer.train.prefixes import token_array
from trainer.types import Row

Plan = list[list[list[int]]]
"""[data rank][micro-batch] -> row numbers."""


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows of the micro-batches of a rank, end to end. A token takes four bytes, or two of a small vocabulary.

    micro_batches: [micro-batches] rows in each. prompts, responses: [rows] tokens. All integers are of the smallest
    unsigned type that they fit in. ids: [tokens], the prompt of each row, then its response. behave: [response tokens]
    float32. old, reference: the same of the rows that `has_old`, `has_reference` ([rows] bool) say have them.
    advantages, weights: [rows] float32. trajectories: [rows] int32.
    """

    micro_batches: npt.NDArray[Any]
    prompts: npt.NDArray[Any]
    responses: npt.NDArray[Any]
    ids: npt.NDArray[Any]
    behave: npt.NDArray[np.float32]
    old: npt.NDArray[np.float32]
    reference: npt.NDArray[np.float32]
    has_old: npt.NDArray[np.bool_]
    has_reference: npt.NDArray[np.bool_]
    advantages: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32]
    trajectories: npt.NDArray[np.int32]

    @classmethod
    def of(cls, micro_batches: Sequence[Sequence[Row]]) -> FlatRows:
        """Flatten rows. Log-probs, advantages and weights become float32, as which they are trained on anyway."""
        rows = [row for batch in micro_batches for row in batch]
        return cls(
            micro_batches=_smallest([len(batch) for batch in micro_batches]),
            prompts=_smallest([len(row.prompt_ids) for row in rows]),
            responses=_smallest([len(row.response_ids) for row in rows]),
            ids=_smallest(np.concatenate([np.zeros(0, np.int32), *map(token_array, rows)])),
            behave=_floats(row.behave_logprobs for row in rows),
            old=_floats(row.old_logprobs for row in rows if row.old_logprobs is not None),
            reference=_floats(row.ref_logprobs for row in rows if row.ref_logprobs is not None),
            has_old=np.array([row.old_logprobs is not None for row in rows], dtype=np.bool_),
            has_reference=np.array([row.ref_logprobs is not None for row in rows], dtype=np.bool_),
            advantages=np.array([row.advantage for row in rows], dtype=np.float32),
            weights=np.array([row.weight for row in rows], dtype=np.float32),
            trajectories=np.array([row.trajectory for row in rows], dtype=np.int32),
        )

    def rows(self) -> list[list[Row]]:
        """The rows again, [micro-batch][row]; their log-probs are views, their ids an array of their own."""
        prompts, responses = self.prompts.tolist(), self.responses.tolist()
        ids = _cut(self.ids, [prompt + response for prompt, response in zip(prompts, responses, strict=True)])
        found = [
            _row(*numbers)
            for numbers in zip(
                ids,
                prompts,
                _cut(self.behave, responses),
                self.advantages.tolist(),
                self.weights.tolist(),
                self.trajectories.tolist(),
                _cut(self.old, responses, self.has_old),
                _cut(self.reference, responses, self.has_reference),
                strict=True,
            )
        ]
        rest = iter(found)
        return [list(itertools.islice(rest, count)) for count in self.micro_batches.tolist()]


def deal(rows: Sequence[Row], plan: Plan, world: World) -> list[list[Row]]:
    """The micro-batches of this rank, of the rows and the plan that rank 0 has; collective.

    Ranks that share layers get the same rows.
    """
    if not world.is_main:
        sent: FlatRows = world.scatter([])
        return sent.rows()
    shares = [[[rows[i] for i in members] for members in batches] for batches in plan]
    if world.size > 1:
        flat = [FlatRows.of(share) for share in shares]
        world.scatter([part for part in flat for _ in range(world.tensor_size)])
    return shares[0]


def _row(
    ids: npt.NDArray[Any],
    prompt: int,
    behave: Sequence[float],
    advantage: float,
    weight: float,
    trajectory: int,
    old: Sequence[float] | None,
    reference: Sequence[float] | None,
) -> Row:
    """prompt: tokens of `ids` that were sent."""
    array = ids.astype(np.int32).tobytes()
    tokens = memoryview(array).cast("i")
    row = Row(tokens[:prompt], tokens[prompt:], behave, advantage, weight, trajectory, old, reference)
    row.array = array
    return row


def _smallest(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """Numbers from 0 on in the smallest unsigned type that has room for them."""
    array = np.asarray(values)
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def _floats(parts: Iterable[Sequence[float]]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *(np.asarray(part, dtype=np.float32) for part in parts)])


def _cut(values: npt.NDArray[Any], lengths: list[int], present: npt.NDArray[np.bool_] | None = None) -> list[Any]:
    """Views of consecutive lengths; None, and nothing of the values, for those that are not present."""
    taken = lengths if present is None else (np.asarray(lengths, dtype=np.int64) * present).tolist()
    ends = itertools.accumulate(taken)
    parts = [values[end - length : end] for end, length in zip(ends, taken, strict=True)]
    if present is None:
        return parts
    return [part if there else None for part, there in zip(parts, present.tolist(), strict=True)]
