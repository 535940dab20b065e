"""Sentences that mislead: what a reader of a trace keeps until it finds something better."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rewards.qa import sub_em_1way
from trainer.tasks.evidence import WORD, has_words, sentences
from trainer.tasks.hotpotqa_data import Document, Question

FEWEST_WORDS = 2
"""Content words that a sentence that misleads has in common with the question, at least."""
STOP_WORDS = frozenset(
    "a about after all also an and any are as at be been before being both but by can could did do does during each "
    "for from had has have he her hers him his how i if in into is it its many may me more most much my no nor not of "
    "on one only or other our out over own same she should so some such than that the their them then there these "
    "they this those through to too under until up very was we were what when where which while who whom whose why "
    "will with would yes you your".split()
)


def distractors_of(question: Question, documents: Sequence[Document]) -> list[tuple[str, str]]:
    """Return (title, sentence) of the documents that are not gold, what misleads most first.

    A document gives the sentence that has most content words in common with the question, its title's words included,
    if these are `FEWEST_WORDS` at least. A sentence that has a gold answer would help, so it is none. Of equals the
    earlier one comes first.

    Args:
        documents: of the context, in the order in which they are read.
    """
    asked = content_words(question.question)
    gold = {document.key for document in question.gold}
    found = []
    for document in documents:
        if document.key in gold:
            continue
        weighed = ((len(asked & content_words(f"{document.title} {one}")), one) for one in sentences(document.text))
        fitting = [
            (weight, one)
            for weight, one in weighed
            if weight >= FEWEST_WORDS and not _holds(f"{document.title} {one}", question.answers)
        ]
        if fitting:
            weight, sentence = max(fitting, key=lambda pair: pair[0])  # the first of equals
            found.append((weight, document.title, sentence))
    found.sort(key=lambda one: -one[0])  # equals keep their order
    return [(title, sentence) for _, title, sentence in found]


def content_words(text: str) -> set[str]:
    """Return the words of a text in lower case, without stop words and the genitive's s."""
    words = {word.lower().replace("\u2019", "'").removesuffix("'s") for word in WORD.findall(text)}
    return words - STOP_WORDS


def _holds(text: str, answers: Sequence[str]) -> bool:
    """Whether a gold answer stands in it as whole words, as it is written or as rewards normalise it."""
    low = text.lower()
    return any(has_words(low, answer.lower()) for answer in answers) or bool(sub_em_1way(text, answers))
