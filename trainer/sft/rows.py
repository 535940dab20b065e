"""Rows of examples, made by threads while the step before is trained.

Tokenizers work without Python's lock, so threads are enough. A GPU waited for one of them: SmolLM2-135M trains on the
rows of 32 traces in the time that one core takes to make them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from trainer.config import RunConfig
from trainer.sft.encoding import Encoder
from trainer.tasks.examples import Example
from trainer.types import Row

MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of examples, and what was left out of them.

    longest: tokens of the longest row, left out or not. long_memories, misfits, misfit: see `Encoder`.
    """

    rows: list[Row]
    too_long: int
    longest: int
    long_memories: int
    misfits: int
    misfit: str

    @property
    def left_out(self) -> int:
        """Answers and whole traces."""
        return self.too_long + self.long_memories + self.misfits


class Making:
    """Rows that are being made."""

    def __init__(self, parts: list[Future[Encoded]]) -> None:
        self._parts = parts

    def result(self) -> Encoded:
        """Wait for them. Raises what making them raised."""
        parts = [part.result() for part in self._parts]
        return Encoded(
            [row for part in parts for row in part.rows],
            too_long=sum(part.too_long for part in parts),
            longest=max((part.longest for part in parts), default=0),
            long_memories=sum(part.long_memories for part in parts),
            misfits=sum(part.misfits for part in parts),
            misfit=next((part.misfit for part in parts if part.misfit), ""),
        )


class RowMaker:
    """Makes rows of examples.

    Args:
        tokenizer: is copied, for no two threads may use one at a time.
        threads: 0: one for every four cores that a rank has, MOST_THREADS at most.

    Raises:
        UserError: see `Encoder`.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, threads: int = 0) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = threads or max(1, min(MOST_THREADS, cores // (4 * config.ranks)))
        self._idle: SimpleQueue[Encoder] = SimpleQueue()
        for _ in range(self._threads):
            self._idle.put(Encoder(config, copy.deepcopy(tokenizer)))
        self._pool = ThreadPoolExecutor(self._threads, "encoding")

    def begin(self, examples: Sequence[Example], longest: int) -> Making:
        """Have the rows of examples made, in their order; those of more than `longest` tokens are left out."""
        size = max(1, -(-len(examples) // self._threads))
        starts = range(0, len(examples), size)
        parts = [(examples[first : first + size], first, longest) for first in starts]
        return Making([self._pool.submit(self._make, *part) for part in parts])

    def close(self) -> None:
        """Make no more."""
        self._pool.shutdown(cancel_futures=True)

    def _make(self, examples: Sequence[Example], first: int, longest: int) -> Encoded:
        encoder = self._idle.get()  # there are as many as threads
        try:
            encoder.misfit = ""
            long_memories, misfits = encoder.long_memories, encoder.misfits
            rows = [row for number, example in enumerate(examples, first) for row in encoder.rows(example, number)]
            kept = [row for row in rows if row.num_tokens <= longest]
            return Encoded(
                kept,
                too_long=len(rows) - len(kept),
                longest=max((row.num_tokens for row in rows), default=0),
                long_memories=encoder.long_memories - long_memories,
                misfits=encoder.misfits - misfits,
                misfit=encoder.misfit,
            )
        finally:
            self._idle.put(encoder)
