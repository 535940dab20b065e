"""How many tokens of a step's rows training computes: what the rows of a group begin with alike once, where it can.

Rows of the expected lengths are divided among the run's ranks and their micro-batches by the trainer's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from trainer.config import RunConfig
from trainer.train.microbatches import LEAST_SHARE, LEAST_SHARED, PrefixGroup, distinct_tokens, room_for, share_out

MOST_ROWS = 30_000
"""Of an optimizer step with more, fewer tasks are divided and stand for the others."""


class Turn(NamedTuple):
    """A turn of a trajectory in tokens: its prompt, with how many of them the prompts of its group begin alike, and its
    response.
    """

    prompt: float
    common: float
    response: float


class Computed(NamedTuple):
    """Tokens of a step's rows: each whole, those that training computes, and as many as if every rank computed as much
    as the busiest, which the others wait for.
    """

    whole: float
    computed: float
    waited_for: float


def training_ranks(config: RunConfig) -> int:
    """Return the ranks that have rows of their own; GPUs that share a sequence (t, c) work on the same rows."""
    allocation = config.allocation
    if allocation is None or allocation.training is None:
        return config.train.ranks
    return allocation.training.layout.data * allocation.training.layout.pipeline


def computed_tokens(config: RunConfig, turns: Sequence[Turn], budget: int = 0) -> Computed:
    """Return the tokens of a step whose trajectories all have these turns.

    budget: tokens of a micro-batch, in place of train.max_tokens_per_mb.
    """
    rollout, train = config.rollout, config.train
    size, lengths = rollout.group_size, _lengths(config, turns)
    whole = rollout.batch_size * size * sum(length for _, length in lengths)
    if size == 1 or not any(common for common, _ in lengths):
        return Computed(whole, whole, whole)
    tasks = max(1, min(rollout.batch_size // train.minibatches, MOST_ROWS // (size * len(lengths))))
    ranks = training_ranks(config)
    loads = _loads(lengths, tasks, size, ranks, budget or train.max_tokens_per_mb)
    steps = rollout.batch_size / tasks
    return Computed(whole, steps * sum(loads), steps * ranks * max(loads))


def room_tokens(config: RunConfig, turns: Sequence[Turn]) -> int:
    """Return the least budget of a micro-batch in which all rows of a group at a turn have room that share a section or
    a question; 0 where no rows begin alike.
    """
    size = config.rollout.group_size
    groups = [(common, length) for common, length in _lengths(config, turns) if common and size > 1]
    rows = tuple((row,) for row in range(size))
    return max((room_for(PrefixGroup(common, rows), [length] * size) for common, length in groups), default=0)


def _lengths(config: RunConfig, turns: Sequence[Turn]) -> tuple[tuple[int, int], ...]:
    """Tokens of each turn's rows: those that bind a group together, and all."""
    return tuple((_shared(turn, config), round(turn.prompt + turn.response)) for turn in turns)


def _shared(turn: Turn, config: RunConfig) -> int:
    """Tokens that bind the rows of a group together; 0 where they are too few to."""
    least = max(LEAST_SHARED, LEAST_SHARE * (turn.prompt + turn.response))
    return round(turn.common) if config.train.share_prefixes and turn.common >= least else 0


@cache
def _loads(lengths: tuple[tuple[int, int], ...], tasks: int, size: int, ranks: int, budget: int) -> tuple[int, ...]:
    """Tokens that each rank computes in an optimizer step. lengths: of each turn, what a group shares, and all."""
    groups: list[PrefixGroup] = []
    tokens: list[int] = []
    for common, length in lengths * tasks:
        groups += _groups(common, range(len(tokens), len(tokens) + size))
        tokens += [length] * size
    return tuple(distinct_tokens(share_out(groups, tokens, ranks, budget), groups, tokens))


def _groups(common: int, rows: range) -> Iterator[PrefixGroup]:
    if common:
        yield PrefixGroup(common, tuple((row,) for row in rows))
    else:
        yield from (PrefixGroup(0, ((row,),)) for row in rows)
