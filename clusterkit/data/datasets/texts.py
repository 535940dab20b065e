"""Rows in Mem-alpha's schema, from questions with their documents or from chapters with their keywords."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterkit.data.datasets.corpora import Chapter
from trainer.seeding import derive_seed, unit_interval
from trainer.tasks.hotpotqa_data import Document, Question
from trainer.tasks.hotpotqa_split import Side

SUMMARY_QUESTION = "Summarise what was read: who is in it, where it takes place and what happens."


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a text."""

    questions: int = 10  # about one text
    documents: int = 60  # of a text, with the questions' own
    chunk_words: int = 1500  # most words of a chunk


def document_text(
    name: str, source: str, questions: Sequence[Question], side: Side, shape: Shape, seed: int
) -> dict[str, Any]:
    """Return one row: the questions' documents among others of the same side, shuffled with the row's own seed."""
    rng = random.Random(derive_seed("memalpha-text", name, seed))
    chosen: dict[str, Document] = {}
    for question in questions:
        chosen.update((document.key, document) for document in question.gold)
    for question in questions:  # their other documents, while there is room
        for document in question.own:
            if len(chosen) < shape.documents:
                chosen.setdefault(document.key, document)
    drawn = rng.sample(side.pool, min(len(side.pool), shape.documents + len(chosen)))
    for document in drawn:
        if len(chosen) >= shape.documents:
            break
        chosen.setdefault(document.key, document)
    documents = list(chosen.values())
    rng.shuffle(documents)
    passages = [document.render() for document in documents]
    return row_of(name, source, pack(passages, shape.chunk_words), [(q.question, q.answers) for q in questions])


def chapter_text(chapter: Chapter, shape: Shape) -> dict[str, Any]:
    """Return one row: a chapter in chunks, and one question for a summary, whose keywords are scored."""
    chunks = pack(_paragraphs(chapter.text), shape.chunk_words)
    return row_of(f"booksum-{chapter.id}", "booksum", chunks, [(SUMMARY_QUESTION, (", ".join(chapter.keywords),))])


def row_of(
    name: str, source: str, chunks: Sequence[str], questions: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, Any]:
    """Return a row in the schema of YuWangX/Memalpha, with lists as JSON texts."""
    pairs = [
        {"question": text, "answer": answers[0] if len(answers) == 1 else list(answers)} for text, answers in questions
    ]
    return {
        "instance_id": name,
        "data_source": source,
        "chunks": json.dumps(list(chunks), ensure_ascii=False),
        "questions_and_answers": json.dumps(pairs, ensure_ascii=False),
        "num_chunks": len(chunks),
        "num_questions": len(questions),
    }


def pack(passages: Sequence[str], chunk_words: int) -> list[str]:
    """Join passages into chunks of at most `chunk_words` words; cut a longer passage between words."""
    chunks: list[list[str]] = []
    size = 0
    for passage in passages:
        for piece in _pieces(passage, chunk_words):
            words = len(piece.split())
            if not words:
                continue
            if not chunks or size + words > chunk_words:
                chunks.append([])
                size = 0
            chunks[-1].append(piece)
            size += words
    return ["\n\n".join(chunk) for chunk in chunks]


def question_groups(questions: Sequence[Question], size: int, seed: int) -> list[list[Question]]:
    """Group questions by `size`, in an order that depends only on seed and ids; the last group may be smaller."""
    ordered = sorted(questions, key=lambda q: unit_interval("memalpha-group", q.id, seed))
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def _pieces(passage: str, chunk_words: int) -> list[str]:
    words = passage.split(" ")
    if len(passage.split()) <= chunk_words:
        return [passage]
    return [" ".join(words[i : i + chunk_words]) for i in range(0, len(words), chunk_words)]


def _paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if part.strip()] or [text]
