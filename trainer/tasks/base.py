"""The protocol of task sources, and what sources over files and sources of generated documents have in common."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from trainer.config_tasks import SectionsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed, shuffled_numbers
from trainer.types import Task

Split = Literal["dev", "test"]


class TaskSource(Protocol):
    """Tasks by number. The same number gives the same task, in whatever order numbers are asked for."""

    train_size: int
    """Training tasks in one epoch."""

    def train(self, index: int) -> Task:
        """Training task number `index` of the whole run, from 0.

        Called in several threads at once, also for tasks that come next.
        Its epoch is `index // train_size`; every epoch holds every training question once, in an order of its own.
        """

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:
        """Held-out task number `index` of a split; the same for every run.

        chunks: length where the source can choose it, in chunks, of hotpotqa in documents; 0: as in training.
        """

    def num_heldout(self, split: Split) -> int:
        """How many held-out tasks a split has."""


class HasId(Protocol):
    """A row of a file."""

    @property
    def id(self) -> str:
        """Unique within the file."""


R = TypeVar("R", bound=HasId)


class RowSource(ABC, Generic[R]):
    """Base of task sources over rows of files.

    Args:
        name: of the task; part of the seed of an epoch's order.
        seed: seed of the run; held-out tasks do not depend on it.
        place: file or folder of the rows, for messages.
    """

    rows_are: ClassVar[str] = "rows"
    """What messages call the rows."""

    def __init__(
        self, name: str, seed: int, place: Path, train: Sequence[R], heldout: Mapping[str, Sequence[R]]
    ) -> None:
        self.name, self.seed, self.place = name, seed, place
        self.set_rows(train, heldout)

    def set_rows(self, train: Sequence[R], heldout: Mapping[str, Sequence[R]]) -> None:
        """Take these rows, of which at least one is for training."""
        self.rows, self.heldout_rows, self.train_size = train, heldout, len(train)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    @abstractmethod
    def make(self, task_id: str, row: R, split: str, epoch: int) -> Task:
        """The task of a row; held-out ones have epoch 0."""

    @abstractmethod
    def asked(self, row: R) -> Task:
        """A row's question alone, without its context."""

    def keep(self, fits: Callable[[Sequence[Task]], Sequence[bool]]) -> str:
        """Leave out rows whose question is too long, as AReaL and verl do. Raises UserError: none is left.

        fits: whether each task's question is short enough.

        Returns:
            How many are left out, as a sentence for the user; empty: none.
        """
        train = self._fitting(self.rows, fits)
        if not train:
            raise UserError(f"{self.place}: all {self.rows_are} are over agent.max_question_tokens: raise it")
        heldout = {name: self._fitting(side, fits) for name, side in self.heldout_rows.items()}
        all_held = sum(map(len, self.heldout_rows.values()))
        left, held = self.train_size - len(train), all_held - sum(map(len, heldout.values()))
        if not left and not held:
            return ""
        told = (
            f"{left} of {self.train_size} {self.rows_are} for training and {held} of {all_held} held-out ones are over "
            f"agent.max_question_tokens: they are left out ({self.place})"
        )
        self.set_rows(train, heldout)
        return told

    def _fitting(self, rows: Sequence[R], fits: Callable[[Sequence[Task]], Sequence[bool]]) -> list[R]:
        return [row for row, kept in zip(rows, fits([self.asked(row) for row in rows]), strict=True) if kept]

    def train(self, index: int) -> Task:
        """See TaskSource; every epoch has an order of its own."""
        row, epoch = self.train_row(index)
        return self.make(f"train-{row.id}-{epoch}", row, "train", epoch)

    def train_row(self, index: int) -> tuple[R, int]:
        """Row and epoch of training task number `index`."""
        epoch, position = divmod(index, self.train_size)
        return self.rows[self._order(epoch)[position]], epoch

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:  # noqa: ARG002 (rows have their own length)
        """See TaskSource. Raises UserError when the split has no such task."""
        row = self.heldout_row(split, index)
        return self.make(f"{split}-{row.id}", row, split, 0)

    def heldout_row(self, split: Split, index: int) -> R:
        """Row of a held-out task. Raises UserError when the split has no such task."""
        rows = self.heldout_rows[split]
        if not 0 <= index < len(rows):
            raise UserError(
                f"the {split} split of {self.place} has {len(rows)} {self.rows_are}; there is no number {index} "
                "(counted from 0): lower eval.num_tasks or raise task.eval_fraction"
            )
        return rows[index]

    def num_heldout(self, split: Split) -> int:
        """See TaskSource."""
        return len(self.heldout_rows[split])

    def _shuffled(self, epoch: int) -> list[int]:
        return shuffled_numbers(self.train_size, f"{self.name}-epoch", self.seed, epoch)


C = TypeVar("C", bound=SectionsConfig)


class GeneratedSource(ABC, Generic[C]):
    """Base of sources of generated documents. A task is a pure function of (seed, split, index, chunks)."""

    train_seed: ClassVar[str]
    """Name that tells the seeds of training tasks apart."""
    heldout_seed: ClassVar[str]
    """The same of held-out tasks."""

    def __init__(self, config: C, seed: int) -> None:
        self.config, self.seed, self.train_size = config, seed, config.train_size

    def num_heldout(self, split: Split) -> int:  # noqa: ARG002 (the protocol's signature)
        """Held-out tasks are generated, so there is no end to them."""
        return 1 << 31

    def train(self, index: int) -> Task:
        """See TaskSource; documents have min_chunks … max_chunks chunks in equal shares."""
        rng = random.Random(derive_seed(self.seed, self.train_seed, index))
        return self._make(f"train-{index}", "train", rng, 0)

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:
        """See TaskSource."""
        rng = random.Random(derive_seed(self.heldout_seed, split, index, chunks))
        return self._make(f"{split}-{chunks}-{index}", split, rng, chunks)

    @abstractmethod
    def _make(self, task_id: str, split: str, rng: random.Random, chunks: int) -> Task:
        """One task; chunks 0: a length as in training."""
