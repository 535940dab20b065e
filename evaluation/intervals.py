"""Two results question by question; intervals of means and of paired differences, by bootstrap; F1 by form.

Percentile bootstrap (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13): the questions are
drawn again with replacement, and the middle 95 % of the means are the interval. For a difference the two answers to a
question are drawn together (paired; Koehn 2004, "Statistical Significance Tests for Machine Translation Evaluation").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from evaluation import metrics

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


MEASURES = (("greedy_acc", "greedy"), ("sample_pass@1", "sampled"), ("f1", "f1"))
"""What is compared, and its name among a question's scores."""


def compare(now: dict[str, Any], then: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Two results, question by question, for every row and measure that both have.

    flips: ids of the questions whose score went up (gained) or down (lost). Questions that only one of them has stay
    out; `questions` says how many were compared, `too_long` how many of these were too long to be asked, then and now,
    which counts as wrong. interval: of the difference (`intervals.bootstrap`, paired).
    """
    earlier = {row["dataset"]: row for row in then["rows"]}
    found = []
    for row in now["rows"]:
        old = earlier.get(row["dataset"])
        if old is None:
            continue
        for measure, key in MEASURES:
            shared = [
                (q, old["questions"][q][key], scores[key])
                for q, scores in row["questions"].items()
                if scores.get(key) is not None and old["questions"].get(q, {}).get(key) is not None
            ]
            if not shared:
                continue
            before, after = [b for _, b, _ in shared], [a for _, _, a in shared]
            test = metrics.paired_test(before, after)
            too_long = [sum(bool(of["questions"][q].get("too_long")) for q, _, _ in shared) for of in (old, row)]
            found.append(
                {
                    "dataset": row["dataset"],
                    "against": name,
                    "measure": measure,
                    "questions": len(shared),
                    "too_long": too_long,
                    "before": metrics.mean(before),
                    "after": metrics.mean(after),
                    "difference": test.difference,
                    "interval": list(bootstrap([a - b for b, a in zip(before, after, strict=True)])),
                    "gained": test.gained,
                    "lost": test.lost,
                    "p_value": test.p_value,
                    "test": test.test,
                    "flips": {
                        "gained": [q for q, b, a in shared if a > b],
                        "lost": [q for q, b, a in shared if a < b],
                    },
                }
            )
    return found
