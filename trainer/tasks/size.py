"""How many training tasks an epoch has: the number that plans are made with, from the same code as the run's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainer.config import RunConfig, TaskConfig
from trainer.errors import UserError
from trainer.sft.examples import examples_file, load_examples
from trainer.tasks.math import Math, problems_file

GENERATED = ("recall", "facts", "needles")
SHARE_OF_TRAINING = ("math", "memalpha")
"""Tasks that hold their share out of the file's rows, of which task.train_size says how many there are."""


@dataclass(frozen=True, slots=True)
class TrainingSize:
    """Training tasks of one epoch. exact: the run makes just that many; else it may be fewer."""

    tasks: int
    exact: bool


def training_size(config: RunConfig) -> TrainingSize:
    """Count the rows where they lie on this machine and are quickly read; else take task.train_size at its word.

    Prompts that are too long are left out when the run starts, and are counted here.
    """
    task = config.task
    if config.trainer.type == "sft" or task.name == "math":
        try:
            return TrainingSize(count_rows(task), exact=task.name == "sft")
        except UserError:
            pass  # the data is elsewhere, or the run will say what is wrong with it
    if task.name in SHARE_OF_TRAINING:
        return TrainingSize(task.train_size - round(task.eval_fraction * task.train_size), exact=False)
    return TrainingSize(task.train_size, exact=task.name in GENERATED)


def count_rows(task: TaskConfig) -> int:
    """Training rows of a file of problems or examples on this machine.

    Raises:
        UserError: there is no such file, or a line of it cannot be used.

    """
    path = examples_file(task) if task.name == "sft" else problems_file(task)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _count(task.model_dump_json(), str(path), state.st_mtime_ns, state.st_size)


def evaluates(config: RunConfig) -> bool:
    """Whether anything is held out to evaluate on, as far as the settings tell."""
    part = config.eval.split == "test" and config.task.name == "memalpha"  # which may have a test file of its own
    return config.task.name not in SHARE_OF_TRAINING or config.task.eval_fraction > 0 or part


@lru_cache(maxsize=8)
def _count(task: str, path: str, mtime_ns: int, size: int) -> int:  # noqa: ARG001 (a changed file is counted anew)
    config = TaskConfig.model_validate_json(task)
    return len(load_examples(config).train) if config.name == "sft" else Math(config, 0).train_size
