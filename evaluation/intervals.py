"""Intervals of means and of paired differences over questions, by bootstrap; F1 by the form of the question.

Percentile bootstrap (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13): the questions are
drawn again with replacement, and the middle 95 % of the means are the interval. For a difference the two answers to a
question are drawn together (paired; Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

ROUNDS, BLOCK = 10_000, 250
"""Draws, and how many of them are in memory as numbers that can be multiplied."""


def bootstrap(scores: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean of scores, one a question, or of differences between two scores of a question.

    The same scores give the same interval. (nan, nan) of nothing.
    """
    if not scores:
        return float("nan"), float("nan")
    values = np.asarray(scores, dtype=np.float64)
    means = np.concatenate([drawn.astype(np.float64) @ values / len(scores) for drawn in _draws(len(scores), seed)])
    low, high = np.quantile(means, [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


@lru_cache(maxsize=4)
def _draws(count: int, seed: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """How often each of `count` questions is in each of ROUNDS draws: blocks of (BLOCK, count).

    A byte is enough: a question is drawn once on average, and never 256 times of more than that.
    """
    rng, shares = np.random.default_rng([seed, count]), np.full(count, 1 / count)
    return [rng.multinomial(count, shares, size=BLOCK).astype(np.uint8) for _ in range(ROUNDS // BLOCK)]


def f1_by_form(questions: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean F1 with its interval and mean exact match: of all questions, then of each form where there are several.

    questions: id -> the scores of `row_results`. Empty where they have no F1.
    """
    scored = [question for question in questions.values() if question.get("f1") is not None]
    forms = sorted({str(question["form"]) for question in scored if question.get("form")})
    groups = [("all", scored)]
    if len(forms) > 1:
        groups += [(form, [one for one in scored if one.get("form") == form]) for form in forms]
    return [_group(form, members) for form, members in groups if members]


def _group(form: str, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    f1 = [float(one["f1"]) for one in members]
    exact = sum(float(one["em"]) for one in members) / len(members)
    return {
        "form": form,
        "questions": len(members),
        "em": exact,
        "f1": sum(f1) / len(f1),
        "interval": list(bootstrap(f1)),
    }


def f1_differences(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each suite with F1: its first row less each other one, over the questions that both have."""
    found = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        of_suite = [row for row in rows if row["suite"] == suite and row.get("f1")]
        for other in of_suite[1:]:
            mine, theirs = of_suite[0]["questions"], other["questions"]
            changes = [mine[q]["f1"] - theirs[q]["f1"] for q in mine if q in theirs]
            if not changes:
                continue
            found.append(
                {
                    "dataset": of_suite[0]["dataset"],
                    "less": other["dataset"],
                    "questions": len(changes),
                    "difference": sum(changes) / len(changes),
                    "interval": list(bootstrap(changes)),
                }
            )
    return found
