"""What a suite is: named tasks, how their answers are graded, and what defines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainer.errors import UserError
from trainer.files import sha256
from trainer.types import Task

Grading = Literal["math", "qa", "strings", "any_string", "exact", "source"]
"""math: equal to the truth. qa: SQuAD's metrics. strings, any_string: all, or one, of the expected strings are in the
answer. exact: the strict reward of the training. source: by the data source's own rule (trainer.rewards.sources)."""
CountTokens = Callable[[str], int]
"""Tokens of a text under the checkpoint's tokenizer."""


def file_digest(path: Path) -> str:
    """SHA-256 of a file. Raises UserError where it cannot be read."""
    try:
        return sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class Suite:
    """Tasks of one row of the table; the method of reading their documents is separate.

    name: as it is asked for, such as ruler_hqa@50.
    grading: see `Grading`.
    identity: what defines its tasks; part of the record's hash.
    load: makes the tasks; raises UserError for data that cannot be used.
    documents: whether its tasks have documents, so that methods of reading can be compared.
    samples: default number of samples per question.
    source: where the data are from, in words.
    notes: remarks for the results.
    rule: data source whose rule scores, for grading "source".
    as_trained: whether problems are put to the model as the training's single-turn agent does.
    """

    name: str
    grading: Grading
    identity: dict[str, Any]
    load: Callable[[CountTokens], list[Task]]
    documents: bool = False
    samples: int = 0
    source: str = ""
    notes: tuple[str, ...] = field(default=())
    rule: str = ""
    as_trained: bool = False
