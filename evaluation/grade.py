"""Verdicts on answers, by the grading of their suite."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from evaluation.config import EvalConfig
from evaluation.record import text_sha
from evaluation.suites.base import Grading
from trainer.grading.extract import READ_CHARACTERS, final_answer
from trainer.grading.pool import GradingPool
from trainer.rewards.boxed import boxed_reward
from trainer.rewards.qa import extract_answer, qa_metrics
from trainer.rewards.sources import needs_judge, scorer

VERSION = 1
"""Raised when verdicts of the same text may change, so that old ones are made again."""


def grading_identity(config: EvalConfig, grading: Grading) -> dict[str, Any]:
    """What shapes the verdicts beside the answers."""
    identity: dict[str, Any] = {"version": VERSION, "grading": grading}
    if grading == "math":
        identity |= {"percent_lenient": config.percent_lenient, "last_number": config.last_number}
        identity |= {"seconds": config.grading_seconds}
    return identity


class Grader:
    """Grades answers as they come. pool: None where no suite is of mathematics."""

    def __init__(self, config: EvalConfig, pool: GradingPool | None) -> None:
        self.config, self.pool = config, pool

    async def verdict(self, grading: Grading, truths: Sequence[str], sample: dict[str, Any]) -> dict[str, Any]:
        """The verdict on a sample, as a line of the record."""
        text = str(sample["text"])
        line = {"id": sample["id"], "sample": sample["sample"], "text_sha": text_sha(text)}
        if reason := sample.get("too_long"):
            return {**line, "answer": "", "right": False, "score": 0.0, "reason": str(reason)}
        if grading == "math":
            found = final_answer(text, self.config.last_number)
            line |= {"answer": found.text[:2000], "how": found.how}
            if not found.text:
                return {**line, "right": False, "score": 0.0, "reason": "no answer"}
            assert self.pool is not None
            verdict = await asyncio.wrap_future(self.pool.submit(truths, found.text))
            return {**line, "right": verdict.right, "score": float(verdict.right), "reason": verdict.reason}
        if grading == "source":
            return {**line, **_by_source(truths, text, sample)}
        return {**line, **_short(grading, truths, text)}


def _short(grading: Grading, truths: Sequence[str], text: str) -> dict[str, Any]:
    if grading == "qa":
        score, answer, reason, metrics = qa_verdict(text, truths)
        return {"answer": answer[:2000], "right": score > 0, "score": score, "reason": reason, "metrics": metrics}
    if grading == "exact":
        score = boxed_reward(text, truths)
        reason = "the gold answer" if score else "not the gold answer in the last box"
        return {"answer": extract_answer(text)[:2000], "right": score > 0, "score": score, "reason": reason}
    score, answer, reason = found_strings(text, truths, any_of=grading == "any_string")
    return {"answer": answer[:2000], "right": score == 1.0, "score": score, "reason": reason}


def _by_source(truths: Sequence[str], text: str, sample: dict[str, Any]) -> dict[str, Any]:
    """The rule of the data source; where that is a model's judgement, what it said when the answer was made."""
    source = str(sample.get("rule", ""))
    if needs_judge(source):
        agrees = sample.get("agrees")
        if agrees is None:
            return {"answer": text[:2000], "right": False, "score": 0.0, "reason": "gave up: no judge said anything"}
        return {"answer": text[:2000], "right": bool(agrees), "score": float(agrees), "reason": "the judge's verdict"}
    score = scorer(source)(text, truths)
    return {"answer": text[:2000], "right": score == 1.0, "score": score, "reason": f"the rule of {source}"}


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
