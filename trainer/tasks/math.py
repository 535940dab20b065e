"""Problems with an answer that can be checked, from JSON Lines as AReaL's data sets have them.

One problem a line: `prompt`, `query_id`, `solutions` (the final answers, each in \\boxed{}). AReaL's prompts are whole:
they hold the chat template's own marks already, which `trainer.agents.single_turn` notices.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from trainer.assets import SHARED_DATASETS
from trainer.config_tasks import ProblemsConfig
from trainer.errors import UserError
from trainer.seeding import unit_interval
from trainer.tasks.base import RowSource
from trainer.tasks.jsonl import read_rows
from trainer.types import Task

log = logging.getLogger(__name__)

KINDS = ("math",)
"""Values of a line's `task` that can be judged here; lines of another kind are left out, and counted."""


class Math(RowSource[Task]):
    """TaskSource over one file of problems; a share of them, by the hash of the id, is held out.

    Raises:
        UserError: the file is missing or cannot be used; names the line.
    """

    rows_are = "problems"

    def __init__(self, config: ProblemsConfig, seed: int) -> None:
        path = problems_file(config)
        problems, other = _read(path)
        if other:
            log.warning("%s: %d lines of another kind than %s are left out", path, other, KINDS[0])
        held = [problem for problem in problems if unit_interval("math-split", problem.id) < config.eval_fraction]
        out = {problem.id for problem in held}
        train = [problem for problem in problems if problem.id not in out][: config.train_size]
        if not train:
            raise UserError(f"{path}: no problem is left to train on: lower task.eval_fraction")
        super().__init__("math", seed, path, train, {"dev": held[::2], "test": held[1::2]})

    def make(self, task_id: str, row: Task, split: str, epoch: int) -> Task:  # noqa: ARG002 (a problem is always the same)
        """See RowSource."""
        return replace(row, id=task_id)

    def asked(self, row: Task) -> Task:
        """See RowSource."""
        return row


def problems_file(config: ProblemsConfig) -> Path:
    """Where the problems are: `task.path`, or `task.dataset` within it, where it is a folder or a data set's name.

    Raises:
        UserError: the settings do not say, or nothing is there.
    """
    if not config.path:
        raise UserError("task.path is empty: name a JSON-lines file of problems, or the folder of task.dataset")
    path = Path(config.path).expanduser()
    if path.is_file():  # of one's own, in place of the preset's folder and file
        return path
    places = [path, SHARED_DATASETS / config.path, SHARED_DATASETS / config.path.rpartition("/")[2]]
    files = [place / config.dataset if config.dataset else place for place in places]
    for file in files:
        if file.is_file():
            return file
        if file.is_dir():
            raise UserError(f"{file} is a folder: name the file within it with task.dataset=FILE.jsonl")
    raise UserError(
        f"no problems there; looked for {', '.join(map(str, files))}. Set task.path to the file, or to the folder of "
        "task.dataset; `clusterkit setup --preset …` fetches a preset's data to the shared storage"
    )


def _read(path: Path) -> tuple[list[Task], int]:
    """Every problem with its own id, and how many lines are of another kind."""
    found: dict[str, Task] = {}
    other = 0
    for row in read_rows(path):
        if row.text("task", default="math") not in KINDS:
            other += 1
            continue
        problem = Task(row.text("query_id"), row.text("prompt"), row.texts("solutions"), meta={"source": "math"})
        if problem.id in found:
            raise row.error(f"query_id '{problem.id}' occurs a second time")
        found[problem.id] = problem
    return list(found.values()), other
