"""How many training tasks an epoch has: the number that plans are made with, from the same code as the run's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from trainer.config import RunConfig
from trainer.config_tasks import (
    FactsConfig,
    HotpotqaConfig,
    MathConfig,
    MemalphaConfig,
    NeedlesConfig,
    RecallConfig,
    SftConfig,
)
from trainer.errors import UserError
from trainer.tasks.examples import examples_file, load_examples
from trainer.tasks.hotpotqa_data import QUESTIONS, find_file, find_folder, is_prepared
from trainer.tasks.hotpotqa_split import split_of
from trainer.tasks.jsonl import read_rows
from trainer.tasks.math import Math, problems_file

GENERATED = (RecallConfig, FactsConfig, NeedlesConfig)
SHARE_OF_TRAINING = (MathConfig, MemalphaConfig)
"""Tasks that hold their share out of the file's rows, of which task.train_size says how many there are."""
CountedTask = SftConfig | MathConfig | HotpotqaConfig
"""Tasks whose files are quickly counted."""


@dataclass(frozen=True, slots=True)
class TrainingSize:
    """Training tasks of one epoch. exact: the run makes just that many; else it may be fewer."""

    tasks: int
    exact: bool


def training_size(config: RunConfig) -> TrainingSize:
    """Count the rows where they lie on this machine and are quickly read; else take task.train_size at its word.

    Prompts that are too long, and questions about documents that held-out ones have, too, are left out when the run
    starts, and are counted here.
    """
    task = config.task
    if isinstance(task, SftConfig | MathConfig) or (isinstance(task, HotpotqaConfig) and task.path):
        try:
            return TrainingSize(count_rows(task), exact=isinstance(task, SftConfig))
        except UserError:
            pass  # the data is elsewhere, or the run will say what is wrong with it
    if isinstance(task, SHARE_OF_TRAINING):
        return TrainingSize(task.train_size - round(task.eval_fraction * task.train_size), exact=False)
    return TrainingSize(task.train_size, exact=isinstance(task, GENERATED))


def count_rows(task: CountedTask) -> int:
    """Training rows of a file of problems or examples, or of a folder of questions, on this machine.

    Raises:
        UserError: there is no such file, or a line of it cannot be used.
    """
    path = _file(task)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _count(type(task), task.model_dump_json(), str(path), state.st_mtime_ns, state.st_size)


def evaluates(config: RunConfig) -> bool:
    """Whether anything is held out to evaluate on, as far as the settings tell."""
    task = config.task
    part = config.eval.split == "test" and isinstance(task, MemalphaConfig)  # which may have a test file of its own
    return not isinstance(task, SHARE_OF_TRAINING) or task.eval_fraction > 0 or part


@lru_cache(maxsize=8)  # the file's place, time and size: a changed one is counted anew
def _count(kind: type[CountedTask], task: str, path: str, _mtime_ns: int, _size: int) -> int:
    config = kind.model_validate_json(task)
    if isinstance(config, HotpotqaConfig):
        # Of a folder that is divided already this is the part for training.
        held_out = 0.0 if is_prepared(find_folder(config.path)) else config.eval_fraction
        ids = (row.text("id") for row in read_rows(Path(path)))
        return min(sum(split_of(one, held_out) == "train" for one in ids), config.train_size)
    return len(load_examples(config).train) if isinstance(config, SftConfig) else Math(config, 0).train_size


def _file(task: CountedTask) -> Path:
    if isinstance(task, HotpotqaConfig):
        folder = find_folder(task.path)
        return find_file(folder / "train" if is_prepared(folder) else folder, QUESTIONS)
    return examples_file(task) if isinstance(task, SftConfig) else problems_file(task)
