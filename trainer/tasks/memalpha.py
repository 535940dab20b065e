"""Texts in the schema of YuWangX/Memalpha: read in chunks, questions asked of the memory afterwards."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from trainer.assets import cache_root
from trainer.config_tasks import TextsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed, unit_interval
from trainer.tasks.base import Split
from trainer.tasks.memalpha_data import Item, read_items
from trainer.tasks.tables import ENDINGS, find_table
from trainer.types import Task

SHARED_DATASETS = Path("/storage/datasets")
HOW_TO_GET = "`clusterkit data prepare memalpha` makes such a folder; YuWangX/Memalpha on the hub is one"


class MemAlphaTexts:
    """TaskSource over a file, or over a folder with `train` and `test` files.

    With a test file `test` is all of it, and `dev` a share of the training file (eval_fraction, by hash of the id) that
    is not trained on; of a single file both are halves of that share. config: path, train_size, eval_fraction and
    max_per_source are read. seed: of the run; held-out tasks do not depend on it.

    Raises:
        UserError: there is no such data, or a row is unusable.

    """

    def __init__(self, config: TextsConfig, seed: int, cache_dir: str = "") -> None:
        self.config, self.seed = config, seed
        train_file, test_file = find_files(config.path, cache_dir)
        self.file = train_file
        train, held = _split(read_items(train_file), config.eval_fraction)
        if test_file is None:
            half = config.eval_fraction / 2
            self._dev = [item for item in held if _share(item) < half]
            self._test = [item for item in held if _share(item) >= half]
        else:
            self._dev, self._test = held, read_items(test_file)
        self._train = _limited(train, config.max_per_source)[: config.train_size]
        if not self._train:
            raise UserError(f"{train_file}: no row is left for training: lower task.eval_fraction, or add rows")
        self.train_size = len(self._train)
        self._order = lru_cache(maxsize=2)(self._shuffled_order)

    def train(self, index: int) -> Task:
        """Training task `index`: another order in every epoch."""
        epoch, position = divmod(index, self.train_size)
        item = self._train[self._order(epoch)[position]]
        return _task(f"train-{item.id}-{epoch}", item)

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:  # noqa: ARG002 (texts have their own length)
        """Held-out task `index` of a split. Raises UserError when the split has no such task."""
        items = self._items(split)
        if not 0 <= index < len(items):
            raise UserError(
                f"the {split} split of {self.file} has {len(items)} rows; there is no number {index} (counted from 0): "
                "lower eval.num_tasks, or raise task.eval_fraction"
            )
        return _task(f"{split}-{items[index].id}", items[index])

    def num_heldout(self, split: Split) -> int:
        """Rows of a held-out split."""
        return len(self._items(split))

    def describe(self) -> str:
        """One line for the log: the file, and how many rows of which sources are trained on."""
        sources = Counter(item.source for item in self._train)
        named = ", ".join(f"{source} {count}" for source, count in sorted(sources.items()))
        held = f"{len(self._dev)} dev, {len(self._test)} test"
        return f"memalpha: {self.file}: {self.train_size} training rows ({named}), {held}"

    def _items(self, split: Split) -> list[Item]:
        return self._dev if split == "dev" else self._test

    def _shuffled_order(self, epoch: int) -> list[int]:
        order = list(range(self.train_size))
        random.Random(derive_seed("memalpha-epoch", self.seed, epoch)).shuffle(order)
        return order


def find_files(path: str | None, cache_dir: str = "") -> tuple[Path, Path | None]:
    """Training file, and test file where there is one.

    Without a path, the first of $CLUSTERKIT_DATA/memalpha, /storage/datasets/memalpha and memalpha in the asset cache
    that has a training file. Raises UserError that says where it looked.
    """
    if path:
        place = Path(path).expanduser()
        if place.is_file():
            return place, None
        if not place.is_dir():
            raise UserError(f"task.path={path}: there is no such file or folder. {HOW_TO_GET}")
        places = [place]
    else:
        places = usual_places(cache_dir)
    for place in places:
        for folder in (place, place / "data"):
            if (train := find_table(folder, "train")) is not None:
                return train, find_table(folder, "test")
    raise UserError(missing(places))


def usual_places(cache_dir: str = "") -> list[Path]:
    """Folders that are looked in where none is named."""
    places = [SHARED_DATASETS / "memalpha", cache_root(cache_dir) / "memalpha"]
    if os.environ.get("CLUSTERKIT_DATA"):
        places.insert(0, Path(os.environ["CLUSTERKIT_DATA"]).expanduser() / "memalpha")
    return places


def missing(places: Sequence[Path]) -> str:
    """What is said where no such data are found."""
    looked = ", ".join(map(str, places))
    return f"no Mem-alpha data: no train file ({', '.join(ENDINGS)}) in {looked}. {HOW_TO_GET}"


def _split(items: list[Item], eval_fraction: float) -> tuple[list[Item], list[Item]]:
    """Training and held-out rows, each in an order that looks random and does not depend on the file's."""
    items = sorted(items, key=lambda item: unit_interval("memalpha-order", item.id))
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        sides[_share(item) < eval_fraction].append(item)
    return sides


def _share(item: Item) -> float:
    return unit_interval("memalpha-split", item.id)


def _limited(items: list[Item], most: int) -> list[Item]:
    """At most so many rows of each source; 0: all."""
    counts: Counter[str] = Counter()
    kept = []
    for item in items:
        counts[item.source] += 1
        if not most or counts[item.source] <= most:
            kept.append(item)
    return kept


def _task(task_id: str, item: Item) -> Task:
    first = item.questions[0]
    meta: dict[str, str | int | float] = {"source": item.source, "chunks": len(item.chunks)}
    return Task(
        id=task_id,
        question=first.question,
        answers=first.answers,
        chunks=item.chunks,
        meta=meta,
        questions=item.questions,
    )
