"""The answers of a row with their verdicts, joined from its record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterkit.common.records import json_object
from clusterkit.common.suggest import did_you_mean
from evaluation.record import text_sha
from trainer.errors import UserError

_PROMPT_CHARACTERS = 6000


@dataclass(frozen=True)
class Answer:
    """One answer."""

    sample: str  # greedy, or its number
    verdict: str  # right, wrong, failed or missing
    answer: str  # what was extracted from the text
    reason: str
    text: str
    length: int
    finish: str
    prompt: str  # the last prompt, where the record has it


@dataclass(frozen=True)
class Entry:
    """A question with its answers. number: from 1, in the order of the suite."""

    number: int
    id: str
    question: str
    truths: list[str]
    prompt: str
    answers: list[Answer] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class RowAnswers:
    """All questions of a row."""

    dataset: str
    entries: list[Entry]
    first_prompt: str


def read_row(results: dict[str, Any], place: Path, dataset: str | None = None) -> RowAnswers:
    """A row's answers.

    Args:
        dataset: name of the row; the first one's when left out.
    """
    rows = {row["dataset"]: row for row in results["rows"]}
    name = dataset if dataset is not None else next(iter(rows), "")
    if name not in rows:
        raise UserError(f"there is no row '{name}' in these results.{did_you_mean(name, rows)} Rows: {', '.join(rows)}")
    row = rows[name]
    folder = place.parent / row["record"]
    samples = {(str(line["id"]), str(line["sample"])): line for line in _lines(folder / "samples.jsonl")}
    verdicts = {(str(line["id"]), str(line["sample"])): line for line in _lines(folder / row["verdicts"])}
    names = [*(["greedy"] if row["greedy_acc"] is not None else []), *map(str, range(row["samples"]))]
    entries = []
    for number, line in enumerate(_lines(folder / "questions.jsonl"), 1):
        key = str(line["id"])
        answers = [_answer(n, samples.get((key, n)), verdicts.get((key, n))) for n in names]
        entries.append(Entry(number, key, line["question"], line["answers"], line.get("prompt", ""), answers))
    if not entries:
        raise UserError(f"the record of {name}, {folder}, is gone: evaluate again")
    first = json.loads((folder / "inputs.json").read_text(encoding="utf-8")).get("first_prompt", "")
    return RowAnswers(name, entries, first)


def find_question(row: RowAnswers, question: str, sample: str = "") -> Entry:
    """A question by number or id, with all answers or one. Raises UserError, saying what there is."""
    by_id = {entry.id: entry for entry in row.entries}
    entry = by_id.get(question)
    if entry is None and question.isdigit() and 1 <= int(question) <= len(row.entries):
        entry = row.entries[int(question) - 1]
    if entry is None:
        raise UserError(
            f"there is no question '{question}' in {row.dataset}: give a number from 1 to {len(row.entries)}, or an id "
            f"such as {row.entries[0].id}"
        )
    if not sample:
        return entry
    chosen = [answer for answer in entry.answers if answer.sample == sample]
    if not chosen:
        samples = ", ".join(answer.sample for answer in entry.answers)
        raise UserError(f"question {entry.number} has no sample '{sample}': there are {samples}")
    return Entry(entry.number, entry.id, entry.question, entry.truths, entry.prompt, chosen)


def listing(row: RowAnswers) -> str:
    """One line a question: number, how many answers are right, the truth, the question's beginning."""
    lines = []
    for entry in row.entries:
        right = sum(answer.verdict == "right" for answer in entry.answers)
        words = " ".join(entry.question.split())
        lines.append(
            f"{entry.number:>5}  {right}/{len(entry.answers)}  {', '.join(entry.truths)[:30]:30}  {words[:80]}"
        )
    return "\n".join(lines)


def shown_question(row: RowAnswers, entry: Entry) -> str:
    """Everything about a question, for reading."""
    parts = [f"{row.dataset}, question {entry.number} (id {entry.id})", f"truth: {' | '.join(entry.truths)}"]
    prompt = entry.prompt or next((answer.prompt for answer in entry.answers if answer.prompt), "")
    parts.append(f"--- prompt\n{_clipped(prompt or entry.question)}")
    for answer in entry.answers:
        end = " (cut off)" if answer.finish == "length" else ""
        parts.append(
            f"--- answer {answer.sample}: {answer.verdict} — {answer.reason}\n"
            f"extracted: {answer.answer or '(nothing)'}; {answer.length} tokens{end}\n{_clipped(answer.text)}"
        )
    return "\n".join(parts)


def _answer(name: str, sample: dict[str, Any] | None, verdict: dict[str, Any] | None) -> Answer:
    if sample is None:
        return Answer(name, "missing", "", "it was not asked for yet", "", 0, "", "")
    if sample.get("error"):
        return Answer(name, "failed", "", str(sample["error"]), "", 0, "", "")
    text = str(sample["text"])
    if verdict is None or verdict.get("text_sha") != text_sha(text):
        verdict = {"right": False, "answer": "", "reason": "not graded yet"}
    word = "right" if verdict["right"] else "wrong"
    details = (sample["length"], sample["finish"], sample.get("final_prompt", ""))
    return Answer(name, word, str(verdict["answer"]), str(verdict["reason"]), text, *details)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if (value := json_object(line)) is not None and "id" in value:
            yield value


def _clipped(text: str) -> str:
    if len(text) <= _PROMPT_CHARACTERS:
        return text
    half = _PROMPT_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
