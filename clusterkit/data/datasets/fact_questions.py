"""Questions in people's words for facts that documents state, of one document and over two.

Over two, one document is told by what the other says of it: "the director of Gigli", "the band that Ann sang for", or
the sentence with X in its place. Or the description of one has that of the other in it.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from clusterkit.data.datasets.asking import BLANK, MOST_WORDS, named
from clusterkit.data.datasets.describing import asked_by_description, clause, description
from clusterkit.data.datasets.facts import MOST_ANSWER_WORDS, NO_SUBJECT, Fact, facts_of
from clusterkit.data.datasets.relations import WORKS
from trainer.tasks.evidence import has_words
from trainer.tasks.hotpotqa_data import Document

DESCRIBED = 0.4
"""Share of the questions about facts that tell what they are about without its name, where a document allows it."""
_NAMES = re.compile(r"[A-Z][\w'-]+|\d[\d,]*")
Asked = tuple[str, str, tuple[tuple[int, str], ...]]
"""A question, its answer, and the (document, sentence) that prove it, in the order of reasoning."""


class FactQuestions:
    """Asks documents for facts. noun: what a document is about, by one word ("film"); empty where unknown."""

    def __init__(
        self,
        documents: Sequence[Document],
        names: Sequence[str],
        sentences: Sequence[Sequence[str]],
        noun: Callable[[int], str],
    ) -> None:
        self._documents, self._names, self._sentences, self._noun = documents, names, sentences, noun
        uses = Counter(names)
        self._alone = {number for number, name in enumerate(names) if uses[name] == 1}
        self._facts: dict[int, list[Fact]] = {}
        self._first = [found[0] if found else "" for found in sentences]
        self._having: dict[str, set[int]] = {}
        for number, first in enumerate(self._first):
            for word in _NAMES.findall(first):
                self._having.setdefault(word, set()).add(number)

    def of(self, number: int, links: Iterable[tuple[str, int]], rng: random.Random) -> Iterator[Asked]:
        """Yield questions that begin with a document, those over two first.

        Args:
            links: (sentence of it, number of another document that this names).
        """
        for sentence, target in links:
            yield from self._over_two(number, sentence, target, rng)
        for fact in _shuffled(self._stated(number), rng):
            question = fact.asked(self._subject(number, fact, rng), rng.random())
            if not has_words(question, fact.value):
                yield question, fact.value, ((number, fact.sentence),)
        name, first = self._names[number], self._first[number]
        question = asked_by_description(name, first) if len(name.split()) <= MOST_ANSWER_WORDS else ""
        if question and has_words(first, name) and self._is_of_one(question):
            yield question, name, ((number, first),)

    def _stated(self, number: int) -> list[Fact]:
        """Return what a document says of its subject; nothing where another one has the same name."""
        if number not in self._facts:
            found = facts_of(self._names[number], self._documents[number].text, self._sentences[number])
            self._facts[number] = list(found) if number in self._alone else []
        return self._facts[number]

    def _over_two(self, number: int, sentence: str, target: int, rng: random.Random) -> Iterator[Asked]:
        links = [fact for fact in self._stated(number) if fact.sentence == sentence]
        link, goal = (number, sentence), self._stated(target)
        subjects = list(self._as_told(number, sentence, target, links, rng))
        masked = self._masked(number, sentence, target)
        for fact in _shuffled(goal if subjects or masked else [], rng):
            question = fact.asked(rng.choice(subjects or ["X"]), rng.random())
            question = question if subjects else f"{masked} {question}"
            if self._stands_alone(question, fact.value, number) and self._names[target] not in question:
                yield question, fact.value, (link, (target, fact.sentence))
                break
        for fact in _shuffled(links, rng):
            question = self._doubly_described(number, fact, target)
            if question and self._stands_alone(question, fact.value, target) and self._names[number] not in question:
                yield question, fact.value, ((target, self._first[target]), link)
                break

    def _stands_alone(self, question: str, answer: str, other: int) -> bool:
        """Whether neither a question nor the other document of two says its answer."""
        told = answer.partition(",")[0]
        known = any(has_words(text, told) for text in (question, self._documents[other].text))
        return not known and not any(has_words(question, year) for year in re.findall(r"\d{4}", answer))

    def _as_told(
        self, number: int, sentence: str, target: int, links: Iterable[Fact], rng: random.Random
    ) -> Iterator[str]:
        """Yield what a sentence of one document calls another: "the director of Gigli"."""
        own, name = self._names[number], self._names[target]
        for link in links:
            if link.value == name and link.relation.noun:
                yield link.relation.noun.format(x=self._subject(number, link, rng))
        if (noun := self._noun(target)) and (said := clause(named(sentence, own), own, name)):
            yield f"the {noun} that {said}"

    def _masked(self, number: int, sentence: str, target: int) -> str:
        """Return a sentence with X in place of another document's name; empty where that may be something else."""
        name, own = self._names[target], self._names[number]
        text = (sentence if own.startswith(NO_SUBJECT) else named(sentence, own)).replace(name, BLANK)
        cut = len(text.split()) > MOST_WORDS or text.count('"') % 2 or re.match("(?:It|He|She|They) ", text)
        if cut or name.endswith("'s") or has_words(own, name) or has_words(text, name):
            return ""
        kind = re.search(rf"\b({WORKS}) \"?{BLANK}", text)
        if kind and not has_words(self._first[target], kind[1]):
            return ""  # the novel that has the name of a film
        if re.fullmatch(WORKS, self._noun(target)) and f'"{BLANK}"' not in text:
            return ""  # what a film has its name of stands without quotation marks
        longer = re.search(rf"{BLANK}(?:\w| [A-Z0-9(])|\s[A-Z][\w.\u2019'-]* {BLANK}", text)
        return "" if longer else text.replace(BLANK, "X")

    def _doubly_described(self, number: int, fact: Fact, target: int) -> str:
        """Return a question whose subject is described by another document's description; empty without one."""
        told, found, after = self._described(number, fact).partition(f" {self._names[target]}")
        if not found or re.match(r"\w| [A-Z]", after) or re.search(r"[A-Z][\w'-]*,?$", told):
            return ""  # no name, or part of a longer one
        told = told.removesuffix(" the")
        other = description(self._names[target], self._first[target], fact.value)
        return fact.asked(f"{told} {other}{after}", 0.0) if other else ""

    def _subject(self, number: int, fact: Fact, rng: random.Random) -> str:
        """Return the name of what a document is about or, now and then, what the fact's own sentence says of it."""
        return (rng.random() < DESCRIBED and self._described(number, fact)) or self._names[number]

    def _described(self, number: int, fact: Fact) -> str:
        """Return a description of what a document is about, from the sentence of a fact, without its value."""
        first = self._first[number]
        told = description(self._names[number], first, fact.value) if fact.sentence == first else ""
        return told if self._is_of_one(told) else ""

    def _is_of_one(self, told: str) -> bool:
        """Whether only one document's first sentence has all names and years of a description."""
        having = [self._having.get(word, set()) for word in _NAMES.findall(told.removeprefix("Which "))]
        return bool(having) and len(set.intersection(*having)) == 1


def _shuffled(facts: Sequence[Fact], rng: random.Random) -> list[Fact]:
    return rng.sample(facts, len(facts))
