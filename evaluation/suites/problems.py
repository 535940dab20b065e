r"""Problems with an answer that can be checked: JSON-lines files in the schemas of AReaL's and of public sets.

The problem is `question`, `problem`, `Question`, `input` or `prompt`, in this order. The truth is what AReaL v0.2
takes: for math_500 the last \boxed in `solution`; else `answer` (text or number; after "####", as GSM8K writes it),
`answers`, `solutions` (AReaL's training data) or the last \boxed in `solution`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from evaluation.suites.base import Suite, file_digest
from trainer.config_tasks import MathConfig
from trainer.errors import UserError
from trainer.grading.extract import last_box
from trainer.tasks.jsonl import Row, kind, read_rows
from trainer.tasks.math import Math, problems_file
from trainer.types import Task

QUESTION_KEYS = ("question", "problem", "Question", "input", "prompt")
ID_KEYS = ("id", "unique_id", "query_id", "idx")
SAMPLES = 32
MOST_HELDOUT = 128
FROM_SOLUTION = ("math_500",)
"""Sets whose truth is taken from the solution, not from `answer`."""


def problem_suite(name: str, path: Path, limit: int = 0) -> Suite:
    """The suite of a file. limit: only the first so many problems; 0: all. Raises UserError if it is unreadable."""
    identity = {"kind": "problems", "sha256": file_digest(path), "limit": limit, "from_solution": name in FROM_SOLUTION}
    return Suite(
        name, "math", identity, lambda _: read_problems(name, path)[: limit or None], False, SAMPLES, str(path)
    )


def heldout_suite(config: MathConfig, limit: int = 0) -> Suite:
    """The problems that a run of task.name=math holds out for its test, put as the training puts them.

    limit: only the first so many; 0: MOST_HELDOUT.

    Raises:
        UserError: the settings name no such problems, or none is held out.
    """
    path = problems_file(config)
    most = limit or MOST_HELDOUT
    identity = {"kind": "math-heldout", "sha256": file_digest(path), "share": config.eval_fraction, "limit": most}

    def load(_: object) -> list[Task]:
        source = Math(config, 0)
        count = min(source.num_heldout("test"), most)
        if not count:
            if not config.eval_fraction:
                raise UserError(
                    f"{path}: the run trained on all of its problems (task.eval_fraction=0), so none is held out: ask "
                    "for other data sets, such as math_500"
                )
            raise UserError(f"{path}: no problem is held out for the test: raise task.eval_fraction (--set)")
        tasks = [source.heldout("test", index) for index in range(count)]
        return [replace(task, answers=tuple(last_box(text) or text for text in task.answers)) for task in tasks]

    return Suite("math", "math", identity, load, False, SAMPLES, str(path), as_trained=True)


def read_problems(name: str, path: Path) -> list[Task]:
    """Every problem of a file. Raises UserError, naming file and line, for what cannot be used."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, row in enumerate(read_rows(path)):
        key = next((key for key in QUESTION_KEYS if key in row.fields), None)
        if key is None:
            raise row.error(f"there is no problem in it: one of {', '.join(QUESTION_KEYS)} is wanted")
        item_id = _row_id(row, number)
        if item_id in seen:
            raise row.error(f"id '{item_id}' occurs a second time (first in line {seen[item_id]}): give it another")
        seen[item_id] = row.line
        tasks.append(Task(item_id, row.text(key).strip(), truths(row, name in FROM_SOLUTION)))
    return tasks


def truths(row: Row, from_solution: bool = False) -> tuple[str, ...]:
    r"""The true answers of a row. Raises UserError where there is none."""
    fields = row.fields
    if (from_solution or not {"answer", "answers", "solutions"} & fields.keys()) and "solution" in fields:
        boxed = last_box(row.text("solution"))
        if not boxed:
            raise row.error(r"column 'solution' has no \boxed{} with the answer")
        return (boxed,)
    if "answer" in fields:
        return (_plain(row, fields["answer"]),)
    for key in ("answers", "solutions"):
        if key in fields:
            return tuple(last_box(text) or text.strip() for text in row.texts(key))
    raise row.error("there is no true answer in it: 'answer', 'answers', 'solutions' or 'solution' is wanted")


def _plain(row: Row, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise row.error(f"column 'answer' must be a text or a number, not {kind(value)}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # amc23 has 27.0
    text = str(value)
    if "####" in text:
        text = text.rpartition("####")[2].replace(",", "")
    if not text.strip():
        raise row.error("column 'answer' is empty")
    return text.strip()


def _row_id(row: Row, number: int) -> str:
    value: Any = next((row.fields[key] for key in ID_KEYS if key in row.fields), number)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise row.error(f"the id must be a text or a whole number, not {kind(value)}")
    return str(value)


def places_of(name: str) -> list[str]:
    """Where the file of a named set may lie below a folder of data; each may be packed as well (.gz)."""
    shapes = [f"{name}/test.jsonl", f"{name}.jsonl", f"math/{name}.jsonl", f"math/{name}_test.jsonl"]
    return [*shapes, f"{name}_test.jsonl", f"math/{name}/test.jsonl", f"data/{name}/test.jsonl"]


def find_problems(name: str, roots: Sequence[Path]) -> Path | None:
    """The file of a named set below one of the folders, in the shapes in which such folders are kept."""
    files = (root / f"{shape}{end}" for root in roots for shape in places_of(name) for end in ("", ".gz"))
    return next((path for path in files if path.is_file()), None)
