"""Splits a HotpotQA corpus into training and held-out sides that share neither questions nor documents.

A question's side is a hash of its id, so it does not depend on what else is in the file. Documents follow:

* what a held-out question owns is held out;
* a training question with a *gold* document among those is dropped, because without it the answer could not be found
  (and so is one with the words of a held-out question under another id);
* a training question with another own document among those loses that document (a distractor takes its place);
* what only training questions own is for training;
* documents that no question owns go to either side by a hash of their text, half each, so that held-out contexts can
  grow long too.

So no text that a held-out context can hold is ever seen in training, or the other way round.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.errors import UserError
from trainer.seeding import unit_interval
from trainer.tasks.hotpotqa_data import Corpus, Document, Question, is_prepared, load_corpus

UNOWNED_HELD_OUT = 0.5
"""Share of the documents without a question that is held out."""


@dataclass(frozen=True, slots=True)
class Side:
    """Questions in a fixed order that looks random, and the documents their contexts are made of (sorted by key)."""

    questions: tuple[Question, ...]
    pool: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Sides:
    """The outcome. dev and test have the same pool, except where a folder was prepared with one of each.

    dropped: training questions left out because a held-out question owns one of their gold documents or asks the same.
    """

    train: Side
    dev: Side
    test: Side
    dropped: int


def load_sides(folder: Path, eval_fraction: float) -> Sides:
    """Read a folder and divide it; one that `clusterkit data prepare reading` has made is divided already.

    Raises:
        UserError: names the file, and the line where there is one.
    """
    if not is_prepared(folder):
        return split_corpus(load_corpus(folder), eval_fraction)
    train, dev, test = (_prepared_side(folder / name) for name in ("train", "dev", "test"))
    return Sides(train, dev, test, 0)


def _prepared_side(folder: Path) -> Side:
    corpus = load_corpus(folder)
    return Side(tuple(corpus.questions), tuple(sorted(corpus.documents, key=lambda d: d.key)))


def split_three(corpus: Corpus, share: float) -> Sides:
    """As `split_corpus`, with dev and test of `share` each that share no document either.

    A dev question with a gold document that a test question owns is dropped (and counted), another one loses the rest.
    """
    sides = split_corpus(corpus, 2 * share)
    dev = _apart(sides.dev.questions, sides.test.questions)
    dev_pool, test_pool = _shared_out(sides.test.pool, dev, sides.test.questions, "reading-pool")
    dropped = sides.dropped + len(sides.dev.questions) - len(dev)
    return replace(sides, dev=Side(dev, dev_pool), test=Side(sides.test.questions, test_pool), dropped=dropped)


def draw_documents(rng: random.Random, question: Question, side: Side, size: int) -> list[Document]:
    """Draw `size` documents: the question's own, gold ones first where not all fit, then others of its side.

    Raises:
        UserError: the question's gold documents are more.
    """
    gold_keys = {document.key for document in question.gold}
    room = size - len(question.gold)
    if room < 0:
        raise UserError(
            f"task.num_documents={size}: question {question.id} has {len(question.gold)} gold documents: "
            f"choose at least {len(question.gold)}"
        )
    own: list[Document] = []
    for document in question.own:
        if document.key in gold_keys:
            own.append(document)
        elif room > 0:
            own.append(document)
            room -= 1
    own_keys = {document.key for document in question.own}
    missing = size - len(own)
    # Every own document may be among those drawn: draw so many more.
    drawn = rng.sample(side.pool, min(len(side.pool), missing + len(own_keys)))
    return own + [document for document in drawn if document.key not in own_keys][:missing]


def split_of(question_id: str, eval_fraction: float) -> str:
    """Split of a question: train, dev or test. dev and test are half of `eval_fraction` each."""
    share = unit_interval("hotpotqa-split", question_id)
    if share >= eval_fraction:
        return "train"
    return "dev" if share < eval_fraction / 2 else "test"


def split_corpus(corpus: Corpus, eval_fraction: float) -> Sides:
    """Divide a corpus as the module describes; a pure function of its rows."""
    by_split: dict[str, list[Question]] = {"train": [], "dev": [], "test": []}
    for question in sorted(corpus.questions, key=lambda q: unit_interval("hotpotqa-order", q.id)):
        by_split[split_of(question.id, eval_fraction)].append(question)
    held = [*by_split["dev"], *by_split["test"]]
    train = _apart(by_split["train"], held)
    documents = sorted(corpus.documents, key=lambda d: d.key)
    train_pool, held_pool = _shared_out(documents, train, held, "hotpotqa-pool")
    return Sides(
        train=Side(train, train_pool),
        dev=Side(tuple(by_split["dev"]), held_pool),
        test=Side(tuple(by_split["test"]), held_pool),
        dropped=len(by_split["train"]) - len(train),
    )


def _apart(questions: Iterable[Question], others: Sequence[Question]) -> tuple[Question, ...]:
    """Questions with neither the words nor a gold document of others, and without the rest of their documents."""
    keys, wordings = _keys(others), {_wording(q) for q in others}
    return tuple(
        replace(q, own=tuple(d for d in q.own if d.key not in keys))
        for q in questions
        if _wording(q) not in wordings and not any(d.key in keys for d in q.gold)
    )


def _shared_out(
    documents: Iterable[Document], questions: Sequence[Question], held: Sequence[Question], seed: str
) -> list[tuple[Document, ...]]:
    """The documents for some questions and those for the held-out ones; what neither owns goes by a hash."""
    owned, owned_by_held = _keys(questions), _keys(held)
    pools: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        free = document.key not in owned and unit_interval(seed, document.key) < UNOWNED_HELD_OUT
        pools[document.key in owned_by_held or free].append(document)
    return [tuple(pool) for pool in pools]


def _keys(questions: Iterable[Question]) -> set[str]:
    return {document.key for question in questions for document in question.own}


def _wording(question: Question) -> str:
    return " ".join(question.question.lower().split())
