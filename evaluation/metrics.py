"""Statistics of an evaluation; standard library only, so that the operator side can compare runs.

A question's samples are a list of bool (or scores from 0 to 1). Accuracies are from 0 to 1 here; tables show them times
100.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import comb, sqrt
from statistics import NormalDist
from typing import Any

DOUBT = 1.0
"""Design effect of one question that is all right or all wrong; gives 95 % coverage from 30 questions on (tests)."""
EXACT_SIGNS = 12
QA_METRICS = ("sub_em", "sub_em_1way", "em", "f1", "boxed_em")


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from `right` of `samples`.

    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, arXiv 2107.03374). Raises ValueError for k > samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {samples}")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; with a tie, the share of the tied answers that is.

    All right answers are one answer, however they are written; wrong ones are told apart by their text without spaces.
    An empty answer is no vote. 0.0 without any vote.
    """
    votes: Counter[tuple[bool, str]] = Counter()
    for answer, is_right in zip(answers, right, strict=True):
        if is_right:
            votes[True, ""] += 1
        elif answer.strip():
            votes[False, "".join(answer.split()).lower()] += 1
    if not votes:
        return 0.0
    most = max(votes.values())
    tied = [is_right for (is_right, _), count in votes.items() if count == most]
    return sum(tied) / len(tied)


def mean(values: Sequence[float]) -> float:
    """Mean; 0.0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def score_interval(scores: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Interval of the mean over questions: Wilson's (1927), with as many questions as the scores are worth.

    Questions are the clusters: a score is 0 or 1, or a mean over a question's samples. Scores between 0 and 1 vary less
    than right and wrong would, by the design effect D = Σ(score - mean)² / (n·mean·(1 - mean)), and the interval is
    that of n / D questions (Franco et al. 2019, "Comparative study of confidence intervals for proportions in complex
    sample surveys"). DOUBT is added to both sides of D: near 0, near 1 and with few questions, where nothing is seen
    of how questions differ, each is all right or all wrong. Scores of 0 and 1 alone have D = 1: Wilson's own.

    scores: from 0 to 1, one a question. (0, 1) of nothing.
    """
    if not scores:
        return 0.0, 1.0
    centre, questions = mean(scores), len(scores)
    binary = questions * centre * (1 - centre)
    effect = (sum((score - centre) ** 2 for score in scores) + DOUBT) / (binary + DOUBT)
    z = NormalDist().inv_cdf((1 + share) / 2)
    worth = questions / effect
    shrunk = 1 + z * z / worth
    middle = (centre + z * z / (2 * worth)) / shrunk
    half = z / shrunk * sqrt(max(0.0, centre * (1 - centre) / worth + z * z / (4 * worth * worth)))
    return max(0.0, min(middle - half, centre)), min(1.0, max(middle + half, centre))


def row_interval(row: Mapping[str, Any], measure: str) -> tuple[float, float] | None:
    """Interval of a measure of a row of results, from its questions; else the interval that the row has."""
    key = {"greedy_acc": "greedy", "sample_pass@1": "sampled"}[measure]
    scores = [question[key] for question in (row.get("questions") or {}).values() if question.get(key) is not None]
    if scores:
        return score_interval(scores)
    low, high = row.get(f"{measure}_interval") or (None, None)
    return None if low is None or high is None else (low, high)


@dataclass(frozen=True, slots=True)
class Paired:
    """Comparison of two checkpoints. gained, lost: questions whose score rose or fell. p_value: two-sided."""

    difference: float
    gained: int
    lost: int
    p_value: float
    test: str


def paired_test(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Paired:
    """Test whether two checkpoints differ, question by question; the scores come in the same order.

    Where all scores are 0 or 1: McNemar's exact test (1947), binomial on the questions that changed. Otherwise a
    permutation test of the mean difference under sign changes (Fisher 1935): exact for up to EXACT_SIGNS changed
    questions, with 10,000 random sign changes beyond.
    """
    changes = [b - a for a, b in zip(before, after, strict=True)]
    changed = [change for change in changes if change]
    gained, lost = sum(c > 0 for c in changed), sum(c < 0 for c in changed)
    if all(score in (0, 1) for score in (*before, *after)):
        p_value, test = mcnemar(gained, lost), "McNemar, exact"
    else:
        p_value, test = _sign_changes(changed, seed), "permutation of signs"
    return Paired(mean(changes), gained, lost, p_value, test)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: as many or more unequal splits of the changed questions by chance."""
    total = gained + lost
    tail: float = sum(comb(total, i) for i in range(min(gained, lost) + 1)) / 2.0**total
    return min(1.0, 2 * tail)


def _sign_changes(changes: Sequence[float], seed: int) -> float:
    if not changes:
        return 1.0
    seen = abs(sum(changes)) - 1e-12
    if len(changes) <= EXACT_SIGNS:
        every = product((1, -1), repeat=len(changes))
        sums = [abs(sum(s * c for s, c in zip(signs, changes, strict=True))) for signs in every]
        return sum(total >= seen for total in sums) / len(sums)
    rng = random.Random(seed)
    rounds = 10_000
    more = sum(abs(sum(c if rng.getrandbits(1) else -c for c in changes)) >= seen for _ in range(rounds))
    return (more + 1) / (rounds + 1)
