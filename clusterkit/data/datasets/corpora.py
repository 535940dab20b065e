"""The contents of inputs in one form: documents with questions, chapters, problems."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from clusterkit.data.datasets.inputs import Input
from trainer.tasks.hotpotqa_data import Corpus, Document, Question, distinct, document_key
from trainer.tasks.jsonl import Row

_NAME = re.compile(r"\b[A-Z][a-z]+(?:\s+[A-Z][a-z]+)*\b")
MOST_KEYWORDS = 12


@dataclass(frozen=True, slots=True)
class Chapter:
    """A part of a book. `keywords`: names of its summary that occur in the text."""

    id: str
    book: str
    text: str
    keywords: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its right answers."""

    id: str
    prompt: str
    solutions: tuple[str, ...]


def question_row(question: Question) -> dict[str, Any]:
    """What a line of questions.jsonl says of a question, without where it comes from."""
    return {
        "id": question.id,
        "question": question.question,
        "answers": list(question.answers),
        "gold_titles": [d.title for d in question.gold],
        "supporting": [d.id for d in question.gold],
        "own_documents": [d.id for d in question.own],
    }


def document_row(document: Document) -> dict[str, Any]:
    """A line of documents.jsonl."""
    return {"id": document.id, "title": document.title, "text": document.text}


def corpus_of(given: Input) -> tuple[Corpus, int]:
    """Return questions and documents of a hotpotqa- or squad-style file, and how many rows were left out.

    Rows are left out without an answer, without their evidence among their documents, or if they repeat a question.
    """
    if given.corpus is not None:
        return given.corpus, 0
    return _hotpotqa(given) if given.style == "hotpotqa" else _squad(given)


def _hotpotqa(given: Input) -> tuple[Corpus, int]:
    by_id: dict[str, Document] = {}
    questions: dict[str, Question] = {}
    question_texts: set[str] = set()
    for row in given.rows:
        own = [_document(by_id, title, "".join(sentences)) for title, sentences in _paragraphs(row)]
        titles = _gold_titles(row)
        gold = distinct(d for d in own if d.title in titles)
        wording = " ".join(row.text("question").lower().split())
        answer = str(row.fields.get("answer") or "").strip()
        if not answer or len(gold) < len(titles) or not titles or wording in question_texts:
            continue
        question_texts.add(wording)
        name = str(row.fields.get("_id") or row.fields.get("id") or _digest(wording))
        questions[name] = Question(name, row.text("question"), (answer,), gold, distinct(own, gold), "hotpotqa")
    return Corpus(list(questions.values()), list(distinct(by_id.values()))), len(given.rows) - len(questions)


def _paragraphs(row: Row) -> list[tuple[str, list[str]]]:
    """Read [[title, [sentence]]] of the official file, or {title: […], sentences: […]} of the hub."""
    context = row.fields.get("context")
    try:
        if isinstance(context, dict):
            pairs = list(zip(context["title"], context["sentences"], strict=True))
        else:
            pairs = [(title, sentences) for title, sentences in context or []]
        return [(str(title), [str(one) for one in sentences]) for title, sentences in pairs]
    except (TypeError, ValueError, KeyError) as error:
        raise row.error("context must be [[title, [sentence, …]], …], or {title: […], sentences: […]}") from error


def _gold_titles(row: Row) -> set[str]:
    facts = row.fields.get("supporting_facts")
    try:
        if isinstance(facts, dict):
            return {str(title) for title in facts["title"]}
        return {str(fact[0]) for fact in facts or []}
    except (TypeError, KeyError, IndexError) as error:
        raise row.error("supporting_facts must be [[title, number], …], or {title: […], sent_id: […]}") from error


def _squad(given: Input) -> tuple[Corpus, int]:
    """The paragraph of a question is its evidence and its only document."""
    by_id: dict[str, Document] = {}
    questions: dict[str, Question] = {}
    question_texts: set[tuple[str, str]] = set()
    for row in given.rows:
        document = _document(by_id, str(row.fields.get("title") or ""), row.text("context"))
        answers = row.fields.get("answers")
        texts = answers.get("text", []) if isinstance(answers, dict) else answers
        if not isinstance(texts, list):
            raise row.error("answers must be {text: [answer, …]}")
        golds = tuple(dict.fromkeys(str(text).strip() for text in texts if str(text).strip()))
        wording = (document.key, " ".join(row.text("question").lower().split()))
        if golds and wording not in question_texts:
            question_texts.add(wording)
            name = str(row.fields.get("id") or _digest("\n".join(wording)))
            questions[name] = Question(name, row.text("question"), golds, (document,), (document,), "squad")
    return Corpus(list(questions.values()), list(distinct(by_id.values()))), len(given.rows) - len(questions)


def _document(known: dict[str, Document], title: str, text: str) -> Document:
    text = " ".join(text.split())
    name = _digest(f"{title}\n{text}")
    return known.setdefault(name, Document(name, title, text, document_key(title, text)))


def chapters_of(given: Input) -> tuple[list[Chapter], int]:
    """Return the chapters of a booksum-style file, and how many were left out: repeated, or without keywords.

    Keywords are names (capitalised words, not only at the beginning of a sentence) of the summary that occur in the
    chapter, the most frequent ones first. Mem-alpha's authors asked a model for them.
    """
    chapters: dict[str, Chapter] = {}
    for row in given.rows:
        text, summary = _either(row, "chapter", "text"), _either(row, "summary", "summary_text")
        book = str(
            next((row.fields[n] for n in ("book_id", "bid", "book") if row.fields.get(n) is not None), "")
        ) or _digest(text)
        words = keywords(text, summary)
        if words:
            chapters.setdefault(_digest(text), Chapter(_digest(text), book, text, words))
    return list(chapters.values()), len(given.rows) - len(chapters)


def keywords(text: str, summary: str) -> tuple[str, ...]:
    """Return the names of a summary that occur in the text, the most frequent of the summary first."""
    counts: Counter[str] = Counter()
    for match in _NAME.finditer(summary):
        before = summary[: match.start()].rstrip()
        starts = not before or before[-1] in ".!?\"'"
        name = match.group()
        # A single word at the beginning of a sentence is a name only if it also occurs elsewhere.
        if not starts or " " in name or re.search(rf"[a-z,] {re.escape(name)}\b", summary):
            counts[name] += 1
    held = [name for name, _ in counts.most_common() if name in text]
    return tuple(held[:MOST_KEYWORDS])


def problems_of(given: Input) -> tuple[list[Problem], int]:
    """Return the problems of a math-style file, and how many were left out: repeated, or without an answer."""
    problems: dict[str, Problem] = {}
    for row in given.rows:
        prompt = _either(row, "problem", "question", "prompt")
        solutions = _solutions(row)
        if solutions:
            name = _digest(" ".join(prompt.lower().split()))
            problems.setdefault(name, Problem(name, prompt, solutions))
    return list(problems.values()), len(given.rows) - len(problems)


def _solutions(row: Row) -> tuple[str, ...]:
    r"""Return the right answers, each in a \boxed{}: from `solutions`, `answer` (GSM8K's after ####) or `solution`."""
    given: Any = row.fields.get("solutions")
    if given is None:
        given = [row.fields.get("answer")] if row.fields.get("answer") is not None else [row.fields.get("solution")]
    if not isinstance(given, list):
        raise row.error("solutions must be a list of texts")
    found = []
    for one in given:
        if isinstance(one, float) and one.is_integer():
            one = int(one)  # noqa: PLW2901 (27.0 is how a table writes 27)
        text = str(one if one is not None else "").strip()
        if "####" in text:
            text = text.rpartition("####")[2].strip().replace(",", "")
        if text:
            found.append(text if "\\boxed" in text else f"\\boxed{{{text}}}")
    return tuple(dict.fromkeys(found))


def _either(row: Row, *columns: str) -> str:
    column = next((name for name in columns if row.fields.get(name) is not None), columns[0])
    return row.text(column)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
