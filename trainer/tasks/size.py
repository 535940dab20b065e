"""How many tasks an epoch and an evaluation have: what plans are made with, from the same code as the run's."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

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
SPLITS = ("train", "dev", "test")


@dataclass(frozen=True, slots=True)
class TaskCount:
    """Tasks of one epoch or one evaluation. exact: the run makes just that many; else it may be fewer."""

    tasks: int
    exact: bool


def training_size(config: RunConfig) -> TaskCount:
    """Count the rows where they lie on this machine and are quickly read; else take task.train_size at its word.

    Prompts that are too long, and questions about documents that held-out ones have, too, are left out when the run
    starts, and are counted here.
    """
    task = config.task
    if isinstance(task, SftConfig | MathConfig) or (isinstance(task, HotpotqaConfig) and task.path):
        try:
            return TaskCount(count_rows(task), exact=isinstance(task, SftConfig))
        except UserError:
            pass  # the data is elsewhere, or the run will say what is wrong with it
    if isinstance(task, SHARE_OF_TRAINING):
        return TaskCount(task.train_size - round(task.eval_fraction * task.train_size), exact=False)
    return TaskCount(task.train_size, exact=isinstance(task, GENERATED))


def evaluated_tasks(config: RunConfig) -> TaskCount:
    """Count the tasks of one evaluation: eval.num_tasks, or all of eval.split where fewer lie on this machine.

    As in `training_size`, questions that are too long are counted.
    """
    task, most, split = config.task, config.eval.num_tasks, config.eval.split
    if "task.name" in config.custom:
        return TaskCount(most, exact=False)
    if split == "train":
        size = training_size(config)
        return TaskCount(min(most, size.tasks), size.exact)
    if isinstance(task, SftConfig | MathConfig) or (isinstance(task, HotpotqaConfig) and task.path):
        with suppress(UserError):  # the data is elsewhere, or the run will say what is wrong with it
            return TaskCount(min(most, count_rows(task, split)), exact=isinstance(task, SftConfig))
    return TaskCount(most, exact=isinstance(task, GENERATED))


def count_rows(task: CountedTask, split: Literal["train", "dev", "test"] = "train") -> int:
    """Rows for training, or of a held-out split, of a file or of a folder of questions on this machine.

    Raises:
        UserError: there is no such file, or a line of it cannot be used.
    """
    path = _file(task, split)
    try:
        state = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    return _count(type(task), task.model_dump_json(), str(path), state.st_mtime_ns, state.st_size)[split]


def evaluates(config: RunConfig) -> bool:
    """Whether anything is held out to evaluate on, as far as the settings tell."""
    task = config.task
    part = config.eval.split == "test" and isinstance(task, MemalphaConfig)  # which may have a test file of its own
    return not isinstance(task, SHARE_OF_TRAINING) or task.eval_fraction > 0 or part


@lru_cache(maxsize=8)  # the file's place, time and size: a changed one is counted anew
def _count(kind: type[CountedTask], task: str, path: str, _mtime_ns: int, _size: int) -> dict[str, int]:
    """Rows of a file by split; of a folder that is divided already every row counts for the split that it is of."""
    config = kind.model_validate_json(task)
    if isinstance(config, HotpotqaConfig):
        ids = [row.text("id") for row in read_rows(Path(path))]
        if is_prepared(find_folder(config.path)):
            counts = dict.fromkeys(SPLITS, len(ids))
        else:
            sides = Counter(split_of(one, config.eval_fraction) for one in ids)
            counts = {name: sides[name] for name in SPLITS}
        return counts | {"train": min(counts["train"], config.train_size)}
    if isinstance(config, SftConfig):
        examples = load_examples(config)
        return dict.fromkeys(SPLITS, len(examples.heldout)) | {"train": len(examples.train)}
    source = Math(config, 0)
    return {"train": source.train_size, "dev": source.num_heldout("dev"), "test": source.num_heldout("test")}


def _file(task: CountedTask, split: str) -> Path:
    if isinstance(task, HotpotqaConfig):
        folder = find_folder(task.path)
        return find_file(folder / split if is_prepared(folder) else folder, QUESTIONS)
    return examples_file(task) if isinstance(task, SftConfig) else problems_file(task)
