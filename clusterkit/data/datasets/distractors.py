"""Sentences that mislead, what a reader keeps until it finds better ones, and the documents that have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from clusterkit.data.datasets.cloze import WORDING
from trainer.rewards.qa import sub_em_1way
from trainer.tasks.evidence import WORD, has_words, sentences
from trainer.tasks.hotpotqa_data import GENERATED, Document, Question

FEWEST_WORDS = 2
"""Content words that a sentence that misleads has in common with the question, at least."""
COMMON = 0.02
"""A word that stands in a larger share of the documents, and in more than `FEW_DOCUMENTS`, tells none of them."""
FEW_DOCUMENTS = 10
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
    asked = asked_words(question)
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


class Misleading:
    """Finds the documents that mislead a reader of a question most; reads all of them once."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._owners: list[int] = []  # of every sentence the number of its document
        self._places: dict[str, list[int]] = {}  # of every word the numbers of the sentences that have it
        owned = Counter[str]()
        for number, document in enumerate(documents):
            title = content_words(document.title)
            found = [title | content_words(one) for one in sentences(document.text)]
            owned.update(set().union(*found))
            for words in found:
                for word in words:
                    self._places.setdefault(word, []).append(len(self._owners))
                self._owners.append(number)
        most = max(COMMON * len(documents), FEW_DOCUMENTS)
        for word in [word for word, count in owned.items() if count > most]:
            del self._places[word]

    def documents(self, question: Question, count: int, without: Collection[str]) -> list[Document]:
        """Return at most `count` documents, first those of which a sentence has most words in common with the question.

        These are the words that count in `distractors_of`, but common ones. None of the documents is gold or holds a
        gold answer. Of equals the earlier one comes first.

        Args:
            without: keys of other documents that are not wanted.
        """
        weights, best = Counter[int](), Counter[int]()
        for word in asked_words(question):
            weights.update(self._places.get(word, ()))
        for place, weight in weights.items():
            if weight >= FEWEST_WORDS:
                best[self._owners[place]] = max(best[self._owners[place]], weight)
        unwanted = {*without, *(document.key for document in question.gold)}
        found: list[Document] = []
        for number in sorted(best, key=lambda one: (-best[one], one)):
            if len(found) == count:
                break
            document = self._documents[number]
            if document.key not in unwanted and not _holds(f"{document.title} {document.text}", question.answers):
                found.append(document)
        return found


def asked_words(question: Question) -> set[str]:
    """Return the content words of a question, of one made by rule without what all such questions say."""
    words = content_words(question.question)
    return words - _WORDING if question.source in GENERATED else words


def content_words(text: str) -> set[str]:
    """Return the words of a text in lower case, without stop words and the genitive's s."""
    words = {word.lower().replace("\u2019", "'").removesuffix("'s") for word in WORD.findall(text)}
    return words - STOP_WORDS


_WORDING = content_words(WORDING)


def _holds(text: str, answers: Sequence[str]) -> bool:
    """Whether a gold answer stands in it as whole words, as it is written or as rewards normalise it."""
    low = text.lower()
    return any(has_words(low, answer.lower()) for answer in answers) or bool(sub_em_1way(text, answers))
