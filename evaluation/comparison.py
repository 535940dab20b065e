"""Two results, question by question."""

from __future__ import annotations

from typing import Any

from evaluation import metrics
from evaluation.intervals import bootstrap

MEASURES = (("greedy_acc", "greedy"), ("sample_pass@1", "sampled"), ("f1", "f1"))
"""What is compared, and its name among a question's scores."""


def compare(now: dict[str, Any], then: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Two results, question by question, for every row and measure that both have.

    flips: ids of the questions whose score went up (gained) or down (lost). Questions that only one of them has stay
    out; `questions` says how many were compared. interval: of the difference (`intervals.bootstrap`, paired).
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
            found.append(
                {
                    "dataset": row["dataset"],
                    "against": name,
                    "measure": measure,
                    "questions": len(shared),
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
