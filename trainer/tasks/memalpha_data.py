"""Rows in the schema of YuWangX/Memalpha, read and checked.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.tasks.jsonl import Row, kind
from trainer.tasks.tables import read_table
from trainer.types import Question


@dataclass(frozen=True, slots=True)
class Item:
    """One text in chunks, and what is asked once it was read."""

    id: str
    source: str
    chunks: tuple[str, ...]
    questions: tuple[Question, ...]


def read_items(path: Path) -> list[Item]:
    """All rows of a file. Raises UserError that names the first bad row, what is wrong with it, and the way out."""
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
    if column not in row.fields:
        there = ", ".join(map(repr, row.fields)) or "none"
        raise row.error(f"column '{column}' is missing (columns there: {there})")
    value = row.fields[column]
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
