"""The files that a task is read from, and what tells their contents apart."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from trainer.config import RunConfig
from trainer.config_tasks import HotpotqaConfig, MathConfig, MemalphaConfig, OwnTaskConfig, SftConfig
from trainer.errors import UserError
from trainer.files import sha256
from trainer.tasks.examples import examples_file
from trainer.tasks.hotpotqa_data import DOCUMENTS, QUESTIONS, find_file, find_folder, is_prepared
from trainer.tasks.hotpotqa_published import HELDOUT, published_file
from trainer.tasks.math import problems_file
from trainer.tasks.memalpha import find_files


def data_digests(config: RunConfig) -> dict[str, str]:
    """Size and hash of each of `data_files`, by its name below the folder of all.

    A process reads a file once, and once more where its size or time has changed since.

    Raises:
        UserError: one is missing or cannot be read.
    """
    files = data_files(config)
    root = Path(os.path.commonpath([file.parent for file in files])) if files else Path()
    try:
        found = ((file, file.stat()) for file in files)
        return {str(file.relative_to(root)): _digest(file, (at.st_size, at.st_mtime_ns)) for file, at in found}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror or error})") from error


@lru_cache
def _digest(file: Path, stamp: tuple[int, int]) -> str:
    """What tells the contents of a file apart. stamp: its size, and its time in ns since 1970."""
    return f"{stamp[0]} bytes, sha256 {sha256(file)[:16]}"


def data_files(config: RunConfig) -> list[Path]:
    """Files of the run's task, held-out ones included. None of tasks that are generated, or of your own from a folder.

    Raises:
        UserError: the settings name none, or one is missing.
    """
    task = config.task
    if isinstance(task, HotpotqaConfig):
        return _hotpotqa(task, config.cache_dir)
    if isinstance(task, MathConfig):
        return [problems_file(task)]
    if isinstance(task, MemalphaConfig):
        return [file for file in find_files(task.path, config.cache_dir) if file]
    if isinstance(task, SftConfig):
        return [examples_file(task)]
    if isinstance(task, OwnTaskConfig) and task.path and (file := Path(task.path).expanduser()).is_file():
        return [file]
    return []


def _hotpotqa(task: HotpotqaConfig, cache_dir: str) -> list[Path]:
    if published := published_file(task.path):
        return [file for file in dict.fromkeys((published, published.with_name(HELDOUT))) if file.is_file()]
    folder = find_folder(task.path, cache_dir)
    sides = [folder / split for split in ("train", "dev", "test")] if is_prepared(folder) else [folder]
    return [find_file(side, name) for side in sides for name in (QUESTIONS, DOCUMENTS)]
