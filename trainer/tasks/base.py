"""Where tasks come from: the protocol that every task source fulfils."""

from __future__ import annotations

from typing import Literal, Protocol

from trainer.types import Task

Split = Literal["dev", "test"]


class TaskSource(Protocol):
    """Tasks by number. The same number gives the same task, in whatever order numbers are asked for."""

    train_size: int
    """Training tasks in one epoch."""

    def train(self, index: int) -> Task:
        """Training task number `index` of the whole run, from 0.

        Its epoch is `index // train_size`; every epoch holds every training question once, in an order of its own.
        """
        ...

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:
        """Held-out task number `index` of a split; the same for every run.

        chunks: length of the document in chunks, where the source can choose it; 0: as in training.
        """
        ...

    def num_heldout(self, split: Split) -> int:
        """How many held-out tasks a split has."""
        ...
