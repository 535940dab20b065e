"""Suites for agents with a memory: texts with several questions each, and what is generated for training.

Texts are in YuWangX/Memalpha's schema, or generated facts; each question is asked of what was kept. Recall (for the
tiny model) and needles (for those that know English) are generated at any length, as the held-out tasks of training.

One suite, so one row, for every data source, because every source has its own rule of scoring. A task is one question;
those of one text share `meta["instance"]`, so that a structured memory is built once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.suites.base import CountTokens, Grading, Suite
from trainer.assets import data_places
from trainer.config_choice import as_class
from trainer.config_tasks import FactsConfig, NeedlesConfig, RecallConfig, SectionsConfig, TaskConfig
from trainer.errors import UserError
from trainer.files import sha256
from trainer.tasks.base import TaskSource
from trainer.tasks.facts import SOURCE, Facts
from trainer.tasks.jsonl import ENDINGS, find_table
from trainer.tasks.memalpha import Item, missing, read_items
from trainer.tasks.needles import Needles
from trainer.tasks.recall import Recall
from trainer.types import Question, Task

FACTS_ITEMS = 64
FOLDERS = ("memalpha", "", "memalpha/data", "data")
"""Where texts may lie below a folder that is named."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Makes the tasks of some texts of a source."""

    items: Sequence[Item]

    def __call__(self, _: CountTokens) -> list[Task]:
        return [task for one in self.items for task in _tasks(one.id, one.source, one.chunks, one.questions)]


def memory_suites(places: Sequence[Path], cache_dir: str = "", limit: int = 0) -> list[Suite]:
    """A suite for every data source of the texts.

    places: files or folders that are looked in before the usual ones. limit: texts of each source; 0: all.

    Raises:
        UserError: there are no such data, or a row is unusable.
    """
    every = [*places, *data_places("memalpha", cache_dir)]
    file = find_texts(every)
    if file is None:
        raise UserError(missing(every))
    items = read_items(file)
    digest = sha256(file)
    suites = []
    for source in sorted({item.source for item in items}):
        texts = [item for item in items if item.source == source]
        texts = texts[:limit] if limit else texts
        identity = {"kind": "memory-1", "file": digest, "source": source, "texts": len(texts)}
        suites.append(_suite(f"memalpha-{source}", source, identity, texts, str(file)))
    return suites


def find_texts(places: Sequence[Path]) -> Path | None:
    """The test file of the first place that has one, or its training file; a place may be the file itself."""
    for place in places:
        if place.is_file():
            return place
        for folder in FOLDERS:
            found = find_table(place / folder, "test") or find_table(place / folder, "train")
            if found is not None:
                return found
    return None


def text_places() -> list[str]:
    """Where such a file may lie below a folder of data sets."""
    names = [f"{stem}{end}" for stem in ("test", "train") for end in (*ENDINGS, "-00000-of-00001.parquet")]
    return [f"{folder}/{name}" for folder in FOLDERS if folder.startswith("memalpha") for name in names]


def facts_suite(chunks: int, settings: TaskConfig, limit: int = 0) -> Suite:
    """Generated facts: held-out texts of so many chunks; 0: the mixture of the training."""
    fields = ("facts_per_chunk", "filler_per_chunk", "num_keys", "num_values", "num_questions")
    count = limit or FACTS_ITEMS
    config = as_class(FactsConfig, settings)
    source = Facts(config, 0)
    items = []
    for index in range(count):
        task = source.heldout("test", index, chunks)
        items.append(Item(task.id, SOURCE, task.chunks, task.questions))
    identity = {"kind": "facts", "chunks": chunks, "items": count, **{f: getattr(config, f) for f in fields}}
    identity |= {"min_chunks": config.min_chunks, "max_chunks": config.max_chunks}
    return _suite(f"facts@{chunks}" if chunks else "facts", SOURCE, identity, items, "generated")


def _suite(name: str, source: str, identity: dict[str, object], items: Sequence[Item], where: str) -> Suite:
    return Suite(name, "source", dict(identity), _Texts(items), True, 0, where, rule=source)


def _tasks(instance: str, source: str, chunks: tuple[str, ...], questions: Sequence[Question]) -> list[Task]:
    meta: dict[str, str | int | float] = {"source": source, "instance": instance}
    return [
        Task(f"{instance}-q{number}", one.question, one.answers, chunks=chunks, meta=meta)
        for number, one in enumerate(questions)
    ]


ITEMS = 128
SECTION_FIELDS = ("facts_per_chunk", "filler_per_chunk", "num_keys", "min_chunks", "max_chunks")


def recall_suite(chunks: int, config: TaskConfig, limit: int = 0) -> Suite:
    """Held-out documents of so many chunks; 0: as in training. config: of the run, as far as it applies."""
    own = as_class(RecallConfig, config)
    return _generated("recall", Recall(own, 0), "exact", (*SECTION_FIELDS, "num_values"), chunks, own, limit)


def needles_suite(chunks: int, config: TaskConfig, limit: int = 0) -> Suite:
    """As `recall_suite`; right where the number stands anywhere in the answer."""
    own = as_class(NeedlesConfig, config)
    return _generated("needles", Needles(own, 0), "any_string", SECTION_FIELDS, chunks, own, limit)


def _generated(
    kind: str,
    source: TaskSource,
    grading: Grading,
    fields: Sequence[str],
    chunks: int,
    config: SectionsConfig,
    limit: int,
) -> Suite:
    count = limit or ITEMS
    identity = {"kind": kind, "chunks": chunks, "items": count, **{f: getattr(config, f) for f in fields}}

    def load(_: object) -> list[Task]:
        return [source.heldout("test", index, chunks) for index in range(count)]

    name = f"{kind}@{chunks}" if chunks else kind
    return Suite(name, grading, identity, load, True, 0, "generated")
