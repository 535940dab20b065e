"""Plan the files of `clusterkit data prepare` memagent, memalpha and math; those of reading are in reading.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from clusterkit.data.datasets.build import BuildPlan, Output
from clusterkit.data.datasets.corpora import (
    Chapter,
    Problem,
    chapters_of,
    corpus_of,
    document_row,
    problems_of,
    question_row,
)
from clusterkit.data.datasets.inputs import TEXT, Input, read_input
from clusterkit.data.datasets.reading import ReadingShape, plan_reading
from clusterkit.data.datasets.texts import Shape, chapter_text, document_text, question_groups
from trainer.errors import UserError
from trainer.seeding import unit_interval
from trainer.tasks.hotpotqa_data import DOCUMENTS, QUESTIONS, Corpus, Document, Question
from trainer.tasks.hotpotqa_split import Side, split_corpus

KINDS = {
    "memagent": ("hotpotqa", "squad"),
    "memalpha": ("hotpotqa", "squad", "booksum", "memalpha"),
    "math": ("math",),
    "reading": (TEXT, "hotpotqa", "squad"),
}
"""What can be prepared, and from which styles of input."""

SETTINGS = {
    "memagent": {"max_per_source"},
    "memalpha": {"test_share", "max_per_source", "seed", "questions", "documents", "chunk_words"},
    "math": {"test_share", "max_per_source", "seed"},
    "reading": {
        *("test_share", "seed", "per_document"),
        *("traces", "trace_mix", "trace_documents", "trace_distractors", "trace_sentences", "traced_share"),
    },
}
"""What the files of each kind depend on beside the inputs."""


def refuse_unused(kind: str, typed: Collection[str]) -> None:
    """Raise UserError for settings, by their names, that the files of a kind do not depend on."""
    for name in typed:
        users = [other for other, settings in SETTINGS.items() if name in settings]
        if users and kind in SETTINGS and kind not in users:
            raise UserError(
                f"--{name.replace('_', '-')} is for {', '.join(users)}, and changes nothing of {kind}: leave it out"
            )


def make_plan(
    kind: str,
    files: Sequence[Path],
    shape: Shape,
    test_share: float,
    most: int,
    seed: int,
    reading: ReadingShape | None = None,
) -> BuildPlan:
    """Read the inputs and plan the files.

    Args:
        test_share: share of the questions, books or problems for the test file.
        most: rows of each source in the training file; 0: all.
        reading: how much is made for reading; the defaults where left out.

    Raises:
        UserError: an input cannot be used, or is named twice.
    """
    if kind not in KINDS:
        raise UserError(f"'{kind}' cannot be prepared: choose {', '.join(KINDS)}")
    inputs = [read_input(path, KINDS[kind]) for path in files]
    twice = [i.name for i in inputs if sum(i.digest == other.digest for other in inputs) > 1]
    if twice:
        raise UserError(f"{' and '.join(twice)} are the same file: name each input once")
    if kind == "reading":
        return plan_reading(inputs, reading or ReadingShape(), test_share, seed)
    settings: dict[str, Any] = {"test_share": test_share, "max_per_source": most, "seed": seed}
    if kind == "memagent":
        return _memagent(inputs, most)
    if kind == "math":
        return _math(inputs, settings)
    shaped = {"questions": shape.questions, "documents": shape.documents, "chunk_words": shape.chunk_words}
    return _memalpha(inputs, shape, settings | shaped)


def _memagent(inputs: list[Input], most: int) -> BuildPlan:
    """Plan questions.jsonl and documents.jsonl, which the task splits and shuffles (docs/hotpotqa.md)."""
    questions: dict[str, Question] = {}
    documents: dict[str, Document] = {}
    left_out = 0
    for given in inputs:
        corpus, lost = corpus_of(given)
        left_out += lost
        ordered = sorted(corpus.questions, key=lambda q: unit_interval("memagent-order", q.id))
        if given.style == "squad":
            ordered = list({question.gold[0].key: question for question in ordered}.values())
            left_out += len(corpus.questions) - len(ordered)
        questions.update((question.id, question) for question in (ordered[:most] if most else ordered))
        documents.update((document.id, document) for document in corpus.documents)
    rows = [questions[name] for name in sorted(questions)]
    for question in rows:
        documents.update((document.id, document) for document in question.own)
    texts = [documents[name] for name in sorted(documents)]

    notes = [
        "Training and held-out questions, with pools that share no document, are told apart when a run reads this.",
        "squad: one question of each paragraph, because two sides could not share it.",
    ]
    outputs = [
        Output(QUESTIONS, len(rows), lambda n: {**question_row(rows[n]), "source": rows[n].source}, "source"),
        Output(DOCUMENTS, len(texts), lambda n: document_row(texts[n]), "kind"),
    ]
    return BuildPlan("memagent", inputs, {"max_per_source": most}, outputs, left_out, notes)


def _memalpha(inputs: list[Input], shape: Shape, settings: dict[str, Any]) -> BuildPlan:
    """Plan train.jsonl and test.jsonl; no document, book or row is in both."""
    makers: dict[str, list[tuple[str, Any]]] = {"train": [], "test": []}
    left_out, seed, share = 0, settings["seed"], settings["test_share"]
    for number, given in enumerate(inputs):
        if given.style == "memalpha":
            for row in given.rows:
                side = "test" if unit_interval("memalpha-test", row.text("instance_id")) < share else "train"
                makers[side].append((row.text("data_source"), dict(row.fields)))
        elif given.style == "booksum":
            chapters, lost = chapters_of(given)
            left_out += lost
            for chapter in chapters:
                side = "test" if unit_interval("memalpha-book", chapter.book) < share else "train"
                makers[side].append(("booksum", chapter))
        else:
            corpus, lost = corpus_of(given)
            train, held, dropped = _by_article(corpus, share) if given.style == "squad" else _by_question(corpus, share)
            left_out += lost + dropped
            for name, one in (("train", train), ("test", held)):
                for place, group in enumerate(question_groups(one.questions, shape.questions, seed)):
                    makers[name].append((given.style, (f"{given.style}-{number}-{name}-{place}", group, one)))
    limited = _limited(makers["train"], settings["max_per_source"], seed)

    def output(name: str, rows: list[tuple[str, Any]]) -> Output:
        def make(number: int) -> dict[str, Any]:
            source, made_of = rows[number]
            if isinstance(made_of, Chapter):
                return chapter_text(made_of, shape)
            if isinstance(made_of, dict):
                return made_of
            row_name, group, side = made_of
            return document_text(row_name, source, group, side, shape, seed)

        return Output(f"{name}.jsonl", len(rows), make)

    notes = [
        "No document, article or book is in both files; the questions of a row share one text, shuffled with a seed of "
        "the row's own.",
        "booksum: keywords are names that summary and chapter share, found by a rule; Mem-alpha asked a model.",
    ]
    outputs = [output("train", limited), output("test", makers["test"])]
    return BuildPlan("memalpha", inputs, settings, outputs, left_out, notes)


def _by_question(corpus: Corpus, share: float) -> tuple[Side, Side, int]:
    """Return a training and a test side that share no document, and how many questions that drops."""
    if not share:
        return Side(tuple(corpus.questions), tuple(corpus.documents)), Side((), ()), 0
    sides = split_corpus(corpus, share)
    held = Side((*sides.dev.questions, *sides.test.questions), sides.test.pool)
    return sides.train, held, sides.dropped


def _by_article(corpus: Corpus, share: float) -> tuple[Side, Side, int]:
    """Like `_by_question` for questions that share paragraphs: whole articles go to one side, none is dropped."""

    def is_test(document: Document) -> bool:
        return unit_interval("memalpha-article", document.title or document.key) < share

    def side(test: bool) -> Side:
        questions = tuple(q for q in corpus.questions if is_test(q.gold[0]) is test)
        return Side(questions, tuple(d for d in corpus.documents if is_test(d) is test))

    return side(False), side(True), 0


def _limited(rows: list[tuple[str, Any]], most: int, seed: int) -> list[tuple[str, Any]]:
    """Return at most so many rows of each source, chosen by a hash; all if `most` is 0."""
    if not most:
        return rows
    order = sorted(range(len(rows)), key=lambda i: unit_interval("memalpha-limit", i, seed))
    counts: Counter[str] = Counter()
    kept = set()
    for i in order:
        if counts[rows[i][0]] < most:
            counts[rows[i][0]] += 1
            kept.add(i)
    return [row for i, row in enumerate(rows) if i in kept]


def _math(inputs: list[Input], settings: dict[str, Any]) -> BuildPlan:
    """train.jsonl and test.jsonl in AReaL's schema (prompt, query_id, solutions), split by a hash of the problem."""
    problems: dict[str, Problem] = {}
    left_out = 0
    for given in inputs:
        found, lost = problems_of(given)
        left_out += lost
        for problem in found:
            left_out += problem.id in problems
            problems.setdefault(problem.id, problem)
    sides: dict[str, list[Any]] = {"train": [], "test": []}
    for name in sorted(problems, key=lambda one: unit_interval("math-order", one, settings["seed"])):
        sides["test" if unit_interval("math-test", name) < settings["test_share"] else "train"].append(problems[name])
    if settings["max_per_source"]:
        sides["train"] = sides["train"][: settings["max_per_source"]]

    def output(name: str) -> Output:
        def make(number: int) -> dict[str, Any]:
            problem = sides[name][number]
            return {
                "prompt": problem.prompt,
                "task": "math",
                "query_id": problem.id,
                "solutions": list(problem.solutions),
            }

        return Output(f"{name}.jsonl", len(sides[name]), make, "task")

    notes = ["The same problem in other words is not recognised; equal ones, up to case and spaces, are merged."]
    return BuildPlan("math", inputs, settings, [output("train"), output("test")], left_out, notes)
