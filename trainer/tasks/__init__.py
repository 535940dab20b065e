"""Task sources by name."""

from __future__ import annotations

from importlib import import_module

from trainer import custom
from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.tasks.base import TaskSource

SOURCES = {
    "recall": "recall:Recall",
    "needles": "needles:Needles",
    "facts": "facts:Facts",
    "math": "math:Math",
    "hotpotqa": "hotpotqa:make_hotpotqa",
    "memalpha": "memalpha:MemAlphaTexts",
}
"""Module below this one, and class or function, by the task's name: only the one that is wanted is imported."""
CACHED = ("hotpotqa", "memalpha")
"""Those that look for their data in the asset cache, too."""


def make_source(config: RunConfig) -> TaskSource:
    """The task source that a configuration names. Raises UserError for data that cannot be used."""
    name = config.task.name
    if custom.is_custom(name):
        return _own(config)
    if name not in SOURCES:
        raise UserError(f"task.name={name} has no tasks to roll out: it is for trainer.type=sft")
    module, _, attribute = SOURCES[name].partition(":")
    made = getattr(import_module(f"trainer.tasks.{module}"), attribute)
    more = (config.cache_dir,) if name in CACHED else ()
    source: TaskSource = made(config.task, config.seed, *more)
    return source


def leave_out_misfits(source: TaskSource, agent: object) -> str:
    """Leave out tasks whose question the agent can tell is too long for it, where both know how (`keep`, `fits`).

    Without it a run would end when it comes to that task, perhaps after days.

    Returns:
        How many are left out, as a sentence for the user; empty: none.

    Raises:
        UserError: none is left.
    """
    keep, fits = getattr(source, "keep", None), getattr(agent, "fits", None)
    return keep(fits) or "" if keep is not None and fits is not None else ""


def _own(config: RunConfig) -> TaskSource:
    source: TaskSource = custom.make("task.name", config.task.name, config.code_dir, config.task, config.seed)
    size = getattr(source, "train_size", None)
    if not isinstance(size, int) or size < 1:
        raise UserError(
            f"task.name={config.task.name}: train_size is {size!r}: set it to the number of training tasks, as in "
            "docs/custom.md"
        )
    return source
