"""Problems with an answer that can be checked, from JSON Lines as AReaL's data sets have them.

One problem a line: `prompt`, `query_id`, `solutions` (the final answers, each in \\boxed{}). AReaL's prompts are whole:
they hold the chat template's own marks already, which `trainer.agents.single_turn` notices.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from trainer.config_tasks import ProblemsConfig
from trainer.errors import UserError
from trainer.seeding import derive_seed, unit_interval
from trainer.tasks.base import Split
from trainer.tasks.hotpotqa_data import SHARED_DATASETS
from trainer.tasks.jsonl import Row, read_rows
from trainer.types import Task

log = logging.getLogger(__name__)

KINDS = ("math",)
"""Values of a line's `task` that can be judged here; lines of another kind are left out, and counted."""


class Math:
    """TaskSource over one file of problems; a share of them, by the hash of the id, is held out.

    Raises UserError for a file that is missing or cannot be used, naming the line.
    """

    def __init__(self, config: ProblemsConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self.path = problems_file(config)
        problems, other = _read(self.path)
        if other:
            log.warning("%s: %d lines of another kind than %s are left out", self.path, other, KINDS[0])
        shares = {problem.id: unit_interval("math-split", problem.id) for problem in problems}
        held = [problem for problem in problems if shares[problem.id] < config.eval_fraction]
        out = {problem.id for problem in held}
        self._train = [problem for problem in problems if problem.id not in out][: config.train_size]
        self._heldout: dict[str, Sequence[Task]] = {"dev": held[::2], "test": held[1::2]}
        if not self._train:
            raise UserError(f"{self.path}: no problem is left to train on: lower task.eval_fraction")
        self.train_size = len(self._train)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def train(self, index: int) -> Task:
        """See TaskSource."""
        epoch, position = divmod(index, self.train_size)
        problem = self._train[self._order(epoch)[position]]
        return Task(f"train-{problem.id}-{epoch}", problem.question, problem.answers, meta=problem.meta)

    def heldout(self, split: Split, index: int, chunks: int = 0) -> Task:  # noqa: ARG002 (a problem has no chunks)
        """See TaskSource. Raises UserError when the split has no such task."""
        side = self._heldout[split]
        if not 0 <= index < len(side):
            raise UserError(
                f"the {split} split of {self.path} has {len(side)} problems; there is no number {index} (counted from "
                "0): lower eval.num_tasks or raise task.eval_fraction"
            )
        problem = side[index]
        return Task(f"{split}-{problem.id}", problem.question, problem.answers, meta=problem.meta)

    def keep(self, fits: Callable[[Task], bool]) -> None:
        """Leave out problems with too long a prompt, as AReaL does. Raises UserError when none is left to train on."""
        train = [problem for problem in self._train if fits(problem)]
        self._heldout = {name: [p for p in side if fits(p)] for name, side in self._heldout.items()}
        if not train:
            raise UserError(f"{self.path}: every prompt is over agent.max_question_tokens: raise it")
        if len(train) < len(self._train):
            log.warning("%s: %d problems have too long a prompt", self.path, len(self._train) - len(train))
        self._train, self.train_size = train, len(train)
        self._order.cache_clear()

    def num_heldout(self, split: Split) -> int:
        """See TaskSource."""
        return len(self._heldout[split])

    def _shuffled(self, epoch: int) -> list[int]:
        numbers = list(range(self.train_size))
        random.Random(derive_seed("math-epoch", self.seed, epoch)).shuffle(numbers)
        return numbers


def problems_file(config: ProblemsConfig) -> Path:
    """Where the problems are: `task.dataset` within `task.path`, which is a folder or the name of a data set.

    Raises:
        UserError: the settings do not say, or nothing is there.

    """
    if not config.path:
        raise UserError("task.path is empty: name a JSON-lines file of problems, or the folder of task.dataset")
    path = Path(config.path).expanduser()
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
        problem = _problem(row)
        if problem.id in found:
            raise row.error(f"query_id '{problem.id}' occurs a second time")
        found[problem.id] = problem
    return list(found.values()), other


def _problem(row: Row) -> Task:
    return Task(row.text("query_id"), row.text("prompt"), row.texts("solutions"), meta={"source": "math"})
