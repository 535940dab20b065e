"""What is generated for training, at any length: recall for the tiny model, needles for those that know English.

The tasks are the held-out ones of the training's own table.
"""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.suites.base import Grading, Suite
from trainer.config_choice import as_class
from trainer.config_tasks import NeedlesConfig, RecallConfig, SectionsConfig, TaskConfig
from trainer.tasks.base import TaskSource
from trainer.tasks.needles import Needles
from trainer.tasks.recall import Recall
from trainer.types import Task

ITEMS = 128
_FIELDS = ("facts_per_chunk", "filler_per_chunk", "num_keys", "min_chunks", "max_chunks")


def recall_suite(chunks: int, config: TaskConfig, limit: int = 0) -> Suite:
    """Held-out documents of so many chunks; 0: as in training. config: of the run, as far as it applies."""
    own = as_class(RecallConfig, config)
    return _suite("recall", Recall(own, 0), "exact", (*_FIELDS, "num_values"), chunks, own, limit)


def needles_suite(chunks: int, config: TaskConfig, limit: int = 0) -> Suite:
    """As `recall_suite`; right where the number stands anywhere in the answer."""
    own = as_class(NeedlesConfig, config)
    return _suite("needles", Needles(own, 0), "any_string", _FIELDS, chunks, own, limit)


def _suite(
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
