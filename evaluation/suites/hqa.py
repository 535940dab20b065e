"""RULER-HQA: two-hop questions whose own paragraphs are hidden among N - 10 others (MemAgent, arXiv 2507.02259).

`ruler_hqa@N` is rebuilt from our HotpotQA files: the first MOST_QUESTIONS held-out questions (no run of ours trains on
them), or all of a split that is named; every item shuffled with a seed of its own. Other documents are of the split's
pool, or of all where that is too small and dev and test share it. `ruler_hqa_official@N` reads MemAgent's eval_N.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.config import Split
from evaluation.suites.base import CountTokens, Suite, file_digest
from trainer.errors import UserError
from trainer.files import sha256
from trainer.seeding import derive_seed
from trainer.tasks.hotpotqa_data import (
    DOCUMENTS,
    GENERATED,
    QUESTIONS,
    Document,
    Question,
    find_file,
    find_folder,
    is_prepared,
    load_corpus,
    render,
)
from trainer.tasks.hotpotqa_split import Side, load_sides
from trainer.types import Task

DEFAULT_DOCUMENTS = 50
MOST_QUESTIONS = 128
EVAL_FRACTION = 0.2
SEED = "ruler-hqa-1"


def hqa_suite(documents: int, folder: str | None, cache_dir: str = "", limit: int = 0, split: Split = "usual") -> Suite:
    """The rebuilt suite with so many documents an item. Raises UserError for data that are missing or too few."""
    place = find_folder(folder, cache_dir)
    identity = {"kind": SEED, "documents": documents, "files": _hashes(place, split), "limit": limit}
    identity |= {} if split == "usual" else {"split": split}
    note = "rebuilt set; scores are not comparable one to one with MemAgent's own 128 questions"

    def load(_: Any) -> list[Task]:
        return build_items(place, documents, limit, split)

    return Suite(f"ruler_hqa@{documents}", "qa", identity, load, True, 0, str(place), (note,))


def _hashes(folder: Path, split: Split) -> dict[str, str]:
    names = (QUESTIONS, DOCUMENTS)
    if is_prepared(folder):
        splits = ["test"] if split == "usual" else split.split("+")
        return {f"{one}/{name}": sha256(find_file(folder / one, name)) for one in splits for name in names}
    return {name: sha256(find_file(folder, name)) for name in names}


def build_items(folder: Path, documents: int, limit: int = 0, split: Split = "usual") -> list[Task]:
    """The items, or the first `limit` of them; the same in every call. Raises UserError for too few documents.

    split: see `EvalConfig.split`. An item does not depend on which other items there are.
    """
    sides = load_sides(folder, EVAL_FRACTION)
    prepared = is_prepared(folder)
    if split == "usual":
        chosen = [("test", sides.test)] if prepared else [("test", sides.test), ("dev", sides.dev)]
    else:
        chosen = [(name, getattr(sides, name)) for name in split.split("+")]
    asked = [(question, name, side) for name, side in chosen for question in side.questions]
    # Of a prepared folder the real ones, where there are any: what was made by rule is for training.
    asked = [one for one in asked if one[0].source not in GENERATED] or asked
    asked = asked[: MOST_QUESTIONS if split == "usual" else None]
    if not asked:
        raise UserError(f"{folder}: no question is held out there: more questions are needed")
    pools = {name: _pool(folder, name, side, documents, prepared) for name, side in chosen}
    return [_item(question, documents, pools[name]) for question, name, _ in asked[: limit or None]]


def _pool(folder: Path, name: str, side: Side, documents: int, prepared: bool) -> Sequence[Document]:
    """The documents that items of a split are filled with. Raises UserError where there are fewer than an item needs.

    prepared: each split has its own documents; else those of training fill up what dev and test lack.
    """
    pool: Sequence[Document] = side.pool
    if documents > len(pool) and not prepared:
        corpus = load_corpus(folder)
        held = {document.key for document in pool}
        pool = [*pool, *sorted((d for d in corpus.documents if d.key not in held), key=lambda d: d.key)]
    if documents > len(pool):
        where = f"{folder / name}, its own split," if prepared else folder
        raise UserError(
            f"ruler_hqa@{documents}: {where} has {len(pool)} different documents: ask for at most {len(pool)}"
        )
    return pool


def _item(question: Question, size: int, pool: Sequence[Document]) -> Task:
    rng = random.Random(derive_seed(SEED, question.id, size))
    gold = {document.key for document in question.gold}
    if len(gold) > size:
        raise UserError(f"ruler_hqa@{size}: a question has {len(gold)} documents with evidence: ask for more documents")
    own = sorted(question.own, key=lambda d: d.key not in gold)[:size]
    mine = {document.key for document in question.own}
    others = [d for d in rng.sample(pool, min(len(pool), size + len(mine))) if d.key not in mine]
    chosen = [*own, *others][:size]
    rng.shuffle(chosen)
    places = [number for number, document in enumerate(chosen, 1) if document.key in gold]
    return Task(
        id=question.id,
        question=question.question,
        answers=question.answers,
        context=render(chosen),
        meta={"num_documents": len(chosen), "form": question.form, "gold_documents": " ".join(map(str, places))},
    )


def official_places(documents: int) -> list[str]:
    """Where MemAgent's file of so many documents may lie below a folder of data."""
    return [f"{folder}eval_{documents or DEFAULT_DOCUMENTS}.json" for folder in ("", "ruler_hqa/", "hotpotqa/")]


def official_suite(name: str, path: Path, limit: int = 0) -> Suite:
    """MemAgent's own file: a JSON list of {context, input, answers, num_docs, index}."""
    identity = {"kind": "ruler-hqa-official", "sha256": file_digest(path), "limit": limit}
    return Suite(name, "qa", identity, lambda _: read_official(path)[: limit or None], True, 0, str(path))


def read_official(path: Path) -> list[Task]:
    """Items of an eval_N.json. Raises UserError, naming the item, for what cannot be used."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}): download the file again") from error
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: must be a JSON list of items with context, input and answers")
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows, 1):
        where = f"{path}, item {number}"
        if not isinstance(row, dict) or not all(key in row for key in ("context", "input", "answers")):
            raise UserError(f"{where}: must be an object with context, input and answers")
        context, answers = row["context"], row["answers"]
        if not isinstance(context, str) or not context:
            raise UserError(
                f"{where}: context is no text (files of 12800 documents and more hold only numbers of documents, which "
                "are not read here): use a file of at most 6400 documents"
            )
        if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
            raise UserError(f"{where}: answers must be a list of texts")
        task_id = str(row.get("index", number))
        if task_id in tasks:
            raise UserError(f"{where}: index {task_id} occurs a second time")
        tasks[task_id] = Task(task_id, str(row["input"]), tuple(answers), context)
    return list(tasks.values())


SAMPLED_DOCUMENTS = 400


def text_qa_suite(
    tokens: int, folder: str | None, cache_dir: str = "", limit: int = 0, split: Split = "usual"
) -> Suite:
    """ruler_qa@TOKENS: the rebuilt RULER-HQA items, with a length instead of a number of documents."""
    place = find_folder(folder, cache_dir)
    identity = {"kind": "ruler-qa-1", "tokens": tokens, "files": _hashes(place, split), "limit": limit}
    identity |= {} if split == "usual" else {"split": split}

    def load(count: CountTokens) -> list[Task]:
        documents = load_corpus(place / "test" if is_prepared(place) else place).documents[:SAMPLED_DOCUMENTS]
        each = count(render(documents)) / len(documents)
        return build_items(place, max(int(tokens / each), 2), limit, split)

    return Suite(f"ruler_qa@{tokens}", "any_string", identity, load, True, 0, str(place))
