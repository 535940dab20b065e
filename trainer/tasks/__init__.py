"""Task sources by name."""

from __future__ import annotations

from trainer import custom
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.tasks.base import TaskSource


def make_source(config: RunConfig) -> TaskSource:
    """The task source that a configuration names. Raises UserError for data that cannot be used."""
    if custom.is_custom(config.task.name):
        return _own(config)
    if config.task.name == "hotpotqa":
        from trainer.tasks.hotpotqa import HotpotQA  # noqa: PLC0415 (reads no data for other tasks)

        return HotpotQA(config.task, config.seed, config.cache_dir)
    if config.task.name == "memalpha":
        from trainer.tasks.memalpha import MemAlphaTexts  # noqa: PLC0415

        return MemAlphaTexts(config.task, config.seed, config.cache_dir)
    if config.task.name == "facts":
        from trainer.tasks.facts import Facts  # noqa: PLC0415

        return Facts(config.task, config.seed)
    if config.task.name != "recall":
        raise UserError(
            f"task.name={config.task.name} has no task source in this version: choose recall, hotpotqa, facts or "
            "memalpha"
        )
    from trainer.tasks.recall import Recall  # noqa: PLC0415

    return Recall(config.task, config.seed)


def _own(config: RunConfig) -> TaskSource:
    source: TaskSource = custom.make("task.name", config.task.name, config.code_dir, config.task, config.seed)
    size = getattr(source, "train_size", None)
    if not isinstance(size, int) or size < 1:
        raise UserError(
            f"task.name={config.task.name}: train_size is {size!r}: set it to the number of training tasks, as in "
            "docs/custom.md"
        )
    return source
