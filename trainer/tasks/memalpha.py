"""Texts in the schema of YuWangX/Memalpha: read in chunks, questions asked of the memory afterwards.

| column | type |
|---|---|
| instance_id | text, unique in the file |
| data_source | text: decides how answers are scored (trainer.rewards.sources) |
| chunks | list of texts, or that as JSON |
| questions_and_answers | list of {question, answer}, or that as JSON; answer is a text, a number or a list of them |

Other columns (prompt, metadata, num_chunks, num_questions) are left alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.assets import data_places
from trainer.config_tasks import TextsConfig
from trainer.errors import UserError
from trainer.seeding import unit_interval
from trainer.tasks.base import RowSource
from trainer.tasks.jsonl import ENDINGS, Row, find_table, kind, read_table
from trainer.types import Question, Task

HOW_TO_GET = "`clusterkit data prepare memalpha` makes such a folder; YuWangX/Memalpha on the hub is one"


@dataclass(frozen=True, slots=True)
class Item:
    """One text in chunks, and the questions that are asked once it was read."""

    id: str
    source: str
    chunks: tuple[str, ...]
    questions: tuple[Question, ...]


class MemAlphaTexts(RowSource[Item]):
    """TaskSource over a file, or over a folder with `train` and `test` files.

    With a test file, `test` is all of it, and `dev` is a share of the training file (eval_fraction, by hash of the id)
    that is not trained on. With a single file, both are halves of that share.

    Raises:
        UserError: there are no such data, or a row is unusable.
    """

    def __init__(self, config: TextsConfig, seed: int, cache_dir: str = "") -> None:
        train_file, test_file = find_files(config.path, cache_dir)
        rows, held = _split(read_items(train_file), config.eval_fraction)
        if test_file is None:
            half = config.eval_fraction / 2
            heldout = {
                "dev": [item for item in held if _share(item) < half],
                "test": [item for item in held if _share(item) >= half],
            }
        else:
            heldout = {"dev": held, "test": read_items(test_file)}
        train = _limited(rows, config.max_per_source)[: config.train_size]
        if not train:
            raise UserError(f"{train_file}: no row is left for training: lower task.eval_fraction, or add rows")
        super().__init__("memalpha", seed, train_file, train, heldout)

    def asked(self, row: Item) -> Task:
        """See RowSource."""
        first = row.questions[0]
        return Task(row.id, first.question, first.answers)

    def make(self, task_id: str, row: Item, split: str, epoch: int) -> Task:  # noqa: ARG002 (a text is always the same)
        """See RowSource."""
        first = row.questions[0]
        meta: dict[str, str | int | float] = {"source": row.source, "chunks": len(row.chunks)}
        return Task(task_id, first.question, first.answers, chunks=row.chunks, meta=meta, questions=row.questions)


def find_files(path: str | None, cache_dir: str = "") -> tuple[Path, Path | None]:
    """Training file, and test file where there is one.

    Args:
        path: file or folder; None: the first of the usual places (`assets.data_places`) that has a training file.

    Raises:
        UserError: says where it looked.
    """
    if path:
        place = Path(path).expanduser()
        if place.is_file():
            return place, None
        if not place.is_dir():
            raise UserError(f"task.path={path}: there is no such file or folder. {HOW_TO_GET}")
        places = [place]
    else:
        places = data_places("memalpha", cache_dir)
    for place in places:
        for folder in (place, place / "data"):
            if (train := find_table(folder, "train")) is not None:
                return train, find_table(folder, "test")
    raise UserError(missing(places))


def missing(places: Sequence[Path]) -> str:
    """Message for data that are in none of these places."""
    looked = ", ".join(map(str, places))
    return f"no Mem-alpha data: no train file ({', '.join(ENDINGS)}) in {looked}. {HOW_TO_GET}"


def _split(items: list[Item], eval_fraction: float) -> tuple[list[Item], list[Item]]:
    """Training and held-out rows, each in an order that looks random and does not depend on the file's."""
    items = sorted(items, key=lambda item: unit_interval("memalpha-order", item.id))
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        sides[_share(item) < eval_fraction].append(item)
    return sides


def _share(item: Item) -> float:
    return unit_interval("memalpha-split", item.id)


def _limited(items: list[Item], most: int) -> list[Item]:
    """At most so many rows of each source; 0: all."""
    counts: Counter[str] = Counter()
    kept = []
    for item in items:
        counts[item.source] += 1
        if not most or counts[item.source] <= most:
            kept.append(item)
    return kept


def read_items(path: Path) -> list[Item]:
    """All rows of a file. Raises UserError for the first bad row: which, what is wrong with it, and the way out."""
    return list(_items(path))


def _items(path: Path) -> Iterator[Item]:
    seen: set[str] = set()
    for row in read_table(path):
        name = row.fields.get("instance_id")
        name = str(name) if isinstance(name, int) and not isinstance(name, bool) else row.text("instance_id")
        if name in seen:
            raise row.error(f"instance_id '{name}' is there twice: every row needs one of its own")
        seen.add(name)
        yield Item(name, row.text("data_source"), _chunks(row), _questions(row))


def _chunks(row: Row) -> tuple[str, ...]:
    value = _list(row, "chunks", "a list of texts")
    for chunk in value:
        if not isinstance(chunk, str):
            raise row.error(f"column 'chunks' must be a list of texts, but holds {kind(chunk)}")
    chunks = tuple(chunk for chunk in value if chunk.strip())
    if not chunks:
        raise row.error("column 'chunks' has no text: there is nothing to read; remove the row")
    return chunks


def _questions(row: Row) -> tuple[Question, ...]:
    value = _list(row, "questions_and_answers", "a list of {question, answer}")
    if not value:
        raise row.error("column 'questions_and_answers' has no question, so nothing could be scored: remove the row")
    questions = []
    for number, pair in enumerate(value, start=1):
        where = f"question {number} of column 'questions_and_answers'"
        if not isinstance(pair, dict) or not {"question", "answer"} <= pair.keys():
            raise row.error(f"{where} must be an object with question and answer")
        if not isinstance(pair["question"], str) or not pair["question"].strip():
            raise row.error(f"{where} has no text")
        answers = pair["answer"] if isinstance(pair["answer"], list) else [pair["answer"]]
        texts = tuple(_answer(one) for one in answers)
        if not texts or not all(texts):
            raise row.error(f"the answer to {where} must be a text, a number, or a list of them")
        questions.append(Question(pair["question"], texts))
    return tuple(questions)


def _answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value).strip()


def _list(row: Row, column: str, wanted: str) -> list[Any]:
    value = row.value(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.error(
                f"column '{column}' is no JSON ({error}): it must be {wanted}; `clusterkit data prepare memalpha` "
                "makes such rows"
            ) from error
    if not isinstance(value, list):
        raise row.error(f"column '{column}' must be {wanted}, not {kind(value)}")
    return value
