"""What a suite is: named tasks, how their answers are graded, and what defines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from trainer.types import Task

Grading = Literal["math", "qa", "strings", "any_string", "exact", "source"]
"""math: equal to the truth. qa: SQuAD's metrics. strings, any_string: all, or one, of the expected strings are in the
answer. exact: the strict reward of the training. source: by the data source's own rule (trainer.rewards.sources)."""
CountTokens = Callable[[str], int]
"""Tokens of a text under the checkpoint's tokenizer."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One row of the table, but for how its documents are read.

    name: as it is asked for, such as ruler_hqa@50. grading: see `Grading`. identity: what defines its tasks, part of
    the record's hash. load: makes the tasks; raises UserError for data that cannot be used. documents: its tasks have
    documents, so that memory, the whole document, retrieval and nothing can be compared. samples: per question unless
    the user says how many. source: where the data are from, in words. rule: data source whose rule scores, for
    grading "source". as_trained: a problem is put to the model as the training's single-turn agent does it.
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
