"""From samples and verdicts to the numbers of a row; results that were written; standard library only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation import metrics
from evaluation.record import GREEDY, RowRecord, text_sha, wanted_keys
from trainer.errors import UserError

PASS_AT = (8, 16, 32)
RESULTS = "results.json"


def row_results(
    record: RowRecord, dataset: str, questions: Sequence[str], greedy: bool, samples: int
) -> dict[str, Any]:
    """All numbers of a row. Answers that are missing, failed or without a verdict count as wrong, and are counted.

    Questions that are too long to be asked are wrong, too: `too_long` says how many.
    Accuracies are from 0 to 1, lengths in tokens (of the answers that are there). `questions` holds the score of every
    question: greedy (0 to 1 or None), and the mean and number right of its samples; of question answering also F1 and
    exact match (of the greedy answer, else the mean of the samples) and the form that is asked for, where it is known.
    """
    outcomes = {key: _outcome(record, key) for key in wanted_keys(questions, greedy, samples)}
    per_question = {q: [outcomes[q, str(n)] for n in range(samples)] for q in questions}
    greedy_scores = [outcomes[q, GREEDY]["score"] for q in questions] if greedy else []
    sample_scores = [metrics.mean([o["score"] for o in per_question[q]]) for q in questions] if samples else []
    answered = [o for o in outcomes.values() if o["there"]]
    by_question = {q: [*([outcomes[q, GREEDY]] if greedy else []), *per_question[q]] for q in questions}
    row: dict[str, Any] = {
        "dataset": dataset,
        "num_questions": len(questions),
        "samples": samples,
        "greedy_length": _length([outcomes[q, GREEDY] for q in questions]) if greedy else None,
        "sample_length": _length([o for q in questions for o in per_question[q]]) if samples else None,
        "greedy_acc": metrics.mean(greedy_scores) if greedy else None,
        "sample_pass@1": metrics.mean(sample_scores) if samples else None,
    }
    right = {q: sum(o["right"] for o in per_question[q]) for q in questions}
    for k in PASS_AT:
        if k <= samples:
            row[f"pass@{k}"] = metrics.mean([metrics.pass_at_k(samples, right[q], k) for q in questions])
    if samples:
        majorities = [
            metrics.majority([o["answer"] for o in per_question[q]], [o["right"] for o in per_question[q]])
            for q in questions
        ]
        row["maj"] = metrics.mean(majorities)
    for name, scores in (("greedy_acc", greedy_scores), ("sample_pass@1", sample_scores)):
        if scores:
            row[f"{name}_interval"] = metrics.score_interval(scores)
    measured = [outcomes[q, GREEDY] for q in questions] if greedy else [o for q in questions for o in per_question[q]]
    of_question: dict[str, dict[str, Any]] = {q: {} for q in questions}
    if any(o["metrics"] for o in measured):
        row["metrics"] = {
            name: metrics.mean([o["metrics"].get(name, 0.0) for o in measured]) for name in metrics.QA_METRICS
        }
        forms = record.forms
        for q in questions:
            answers = [outcomes[q, GREEDY]] if greedy else per_question[q]
            of_question[q] = {
                **{name: metrics.mean([o["metrics"].get(name, 0.0) for o in answers]) for name in ("f1", "em")},
                **({"form": forms[q]} if q in forms else {}),
            }
    kept = [float(o["counters"]["memory_tokens"]) for o in answered if "memory_tokens" in o["counters"]]
    if kept:
        row["memory_tokens"] = metrics.mean(kept)
    row |= {
        "answers": len(outcomes),
        "missing": len(outcomes) - len(answered),
        "failed": sum(bool(o["error"]) for o in outcomes.values()),
        "too_long": sum(any(o["too_long"] for o in of) for of in by_question.values()),
        "no_answer": sum(not o["answer"] and not o["too_long"] for o in answered),
        "cut_off": sum(o["cut"] for o in answered),
        "grading_gave_up": sum(o["reason"].startswith("gave up") for o in answered),
        "shortened_documents": sum("truncated_context" in o["counters"] for o in answered),
        "questions": {
            q: {
                "greedy": outcomes[q, GREEDY]["score"] if greedy else None,
                "sampled": metrics.mean([o["score"] for o in per_question[q]]) if samples else None,
                "right": right[q],
                **of_question[q],
                **({"too_long": True} if any(o["too_long"] for o in by_question[q]) else {}),
            }
            for q in questions
        },
    }
    return row


def too_long_note(name: str, count: int, total: int, reason: str) -> str:
    """The sentence about questions of a row that were too long to be asked. reason: of the first of them."""
    return (
        f"{name}: questions that are too long: {count} of {total}; they count as asked and wrong. The first: {reason}"
    )


def note_of_record(record: RowRecord, row: dict[str, Any]) -> str:
    """`too_long_note` of a row's numbers; empty where no question was too long."""
    found = [q for q, question in row["questions"].items() if question.get("too_long")]
    if not found:
        return ""
    answers = [line for (q, _), line in record.samples.entries.items() if q == found[0]]
    # Of an older version there may be answers to a prompt that was cut.
    reason = next(str(line["too_long"]) for line in answers if line.get("too_long"))
    return too_long_note(row["dataset"], len(found), row["num_questions"], reason)


def _outcome(record: RowRecord, key: tuple[str, str]) -> dict[str, Any]:
    sample = record.samples.entries.get(key, {})
    text = str(sample.get("text", ""))
    verdict = record.verdicts.entries.get(key, {})
    answered = bool(sample) and not sample.get("error") and verdict.get("text_sha") == text_sha(text)
    if not answered:
        verdict = {}
    return {
        "there": answered,
        "error": sample.get("error") or "",
        "score": float(verdict.get("score", 0.0)),
        "right": bool(verdict.get("right", False)),
        "answer": str(verdict.get("answer", "")),
        "too_long": answered and bool(sample.get("too_long")),
        "reason": str(verdict.get("reason", "")),
        "metrics": verdict.get("metrics") or {},
        "length": sample.get("length", 0),
        "cut": sample.get("finish") == "length",
        "counters": sample.get("counters") or {},
    }


def _length(outcomes: Sequence[dict[str, Any]]) -> float | None:
    lengths = [o["length"] for o in outcomes if o["there"] and not o["too_long"]]
    return metrics.mean(lengths) if lengths else None


def find_results(place: str) -> Path:
    """The results in a folder, or the newest below it. Raises UserError where there are none."""
    folder = Path(place).expanduser()
    if folder.is_file():
        return folder
    if (folder / RESULTS).is_file():
        return folder / RESULTS
    found = list(folder.glob(f"*/{RESULTS}"))
    if not found:
        raise UserError(f"{place}: no {RESULTS} of an evaluation there: name the folder that clusterkit eval printed")
    return max(found, key=lambda path: path.stat().st_mtime)


def read_results(path: Path) -> dict[str, Any]:
    """Results as they were written. Raises UserError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found["rows"], list):
            raise TypeError("rows is no list")
        return dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no results of an evaluation ({error})") from error
