"""Question answering graded as published tables do, and needle tasks by the share of the expected strings found."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.grading.extract import READ_CHARACTERS
from trainer.rewards.qa import extract_answer, qa_metrics

METRICS = ("sub_em", "sub_em_1way", "em", "f1", "boxed_em")


def qa_verdict(response: str, answers: Sequence[str]) -> tuple[float, str, str, dict[str, float]]:
    """Score (sub_em, as MemAgent's tables), extracted answer, reason and all metrics of a response.

    The answer is the content of the last box, or what follows "the answer is"; else the answer is empty, and wrong. See
    `trainer.rewards.qa`.
    """
    text = response[-READ_CHARACTERS:]
    metrics = qa_metrics(text, answers)
    predicted = extract_answer(text)
    if not predicted.strip():
        return 0.0, "", "no answer", metrics
    reason = next((name for name in ("em", "sub_em_1way", "sub_em") if metrics[name]), "none of the gold answers")
    return metrics["sub_em"], predicted, reason, metrics


def found_strings(response: str, expected: Sequence[str], any_of: bool = False) -> tuple[float, str, str]:
    """Share of the expected strings that the answer holds (case does not matter), the answer, and which are missing.

    RULER's string_match_all (Hsieh et al. 2024, arXiv 2404.06654); any_of: one is enough, its string_match_part. The
    answer is the content of the last box where there is one, else all that follows the last </think>.
    """
    text = response[-READ_CHARACTERS:]
    answer = extract_answer(text) or text.rpartition("</think>")[2].strip()
    lowered = answer.lower()
    missing = [string for string in expected if string.lower() not in lowered]
    share = 1 - len(missing) / len(expected)
    if any_of:
        share = float(share > 0)
    if not answer:
        return 0.0, "", "no answer"
    return share, answer, "found" if share == 1 else f"missing: {', '.join(missing[:5])}"
