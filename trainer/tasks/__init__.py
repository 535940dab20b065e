"""Task sources by name."""

from __future__ import annotations

from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.tasks.base import TaskSource


def make_source(config: RunConfig) -> TaskSource:
    """The task source that a configuration names. Raises UserError for data that cannot be used."""
    if config.task.name == "hotpotqa":
        from trainer.tasks.hotpotqa import HotpotQA  # noqa: PLC0415 (reads no data for other tasks)

        return HotpotQA(config.task, config.seed, config.cache_dir)
    if config.task.name != "recall":
        raise UserError(f"task.name={config.task.name} has no task source in this version: choose recall or hotpotqa")
    from trainer.tasks.recall import Recall  # noqa: PLC0415

    return Recall(config.task, config.seed)
