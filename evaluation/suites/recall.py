"""Multi-chunk recall: what the tiny model is trained on, at any length; the held-out tasks of the training's table."""

from __future__ import annotations

from evaluation.suites.base import Suite
from trainer.config import TaskConfig
from trainer.tasks.recall import Recall
from trainer.types import Task

ITEMS = 128


def recall_suite(chunks: int, config: TaskConfig, limit: int = 0) -> Suite:
    """Held-out documents of so many chunks; 0: the mixture of the training."""
    fields = ("facts_per_chunk", "filler_per_chunk", "num_keys", "num_values", "min_chunks", "max_chunks")
    count = limit or ITEMS
    identity = {"kind": "recall", "chunks": chunks, "items": count, **{f: getattr(config, f) for f in fields}}

    def load(_: object) -> list[Task]:
        source = Recall(config, 0)
        return [source.heldout("test", index, chunks) for index in range(count)]

    name = f"recall@{chunks}" if chunks else "recall"
    return Suite(name, "exact", identity, load, True, 0, "generated")
