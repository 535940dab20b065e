"""Extractive questions made from documents by rule: blanks to fill, and chains over two documents.

* **cloze**: a sentence with a blank. What is missing is the document's own title, the title of another document, a
  name, a year or a number, so the answer stands in the document word for word.
* **chain**: a sentence of one document mentions the title of another. The question describes the second document by
  that sentence alone and asks what follows some words in it, so both must be read.

Half of them show a blank, the others ask with a question word in its place, as people do (`asking`). Questions that
compare two documents are `comparison`'s; those that ask for facts in people's words are `fact_questions`'.
"""

from __future__ import annotations

import hashlib
import html
import random
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from clusterkit.data.datasets.answers import name_start, number_word
from clusterkit.data.datasets.asking import BLANK, asked, asked_of, chained, clip, named, question_word
from clusterkit.data.datasets.comparison import TEMPLATES, Comparisons
from clusterkit.data.datasets.fact_questions import FactQuestions
from clusterkit.data.datasets.prose import is_one_sentence, whole_sentences
from trainer.seeding import derive_seed
from trainer.tasks.evidence import WORD, has_words, name_of, sentences
from trainer.tasks.hotpotqa_data import GENERATED, Document

CLOZE, CHAIN, COMPARISON, FACT = GENERATED
MOST_ANSWER_WORDS = 6
MOST_CHARACTERS = 400
"""Of a question: about a hundred tokens, which agents of small models take."""
_NAME = re.compile(r"[A-Z][\w\u2019'-]+(?: (?:of |the |de |von |van )?[A-Z][\w\u2019'-]+)+")
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,.]+\d(?![\w%])")
_CALENDAR = frozenset(
    "January February March April May June July August September October November December "
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
)
_TITLE_ASKED = ("Which name fits the blank? “{}”", "Fill in the blank: “{}”", "Who or what is meant by the blank? “{}”")
_IN_TITLE = (
    "In the article “{title}”, what fits the blank? “{text}”",
    "What is missing in this sentence about {title}? “{text}”",
)
_CHAINED = (
    "Take what the blank stands for: “{first}” In the article about it, what follows the words “{cue}”?",
    "“{first}” The blank has an article of its own. What comes after “{cue}” there?",
)
_ASKING = ("About", "who", "whose", "what year", "how many", "what place", "something that", "X", BLANK)
WORDING = re.sub(r"{\w*}", "", " ".join((*_TITLE_ASKED, *_IN_TITLE, *_CHAINED, *TEMPLATES, *_ASKING)))
"""All that questions made by rule say of themselves, whatever they ask for."""


@dataclass(frozen=True, slots=True)
class Made:
    """A question with what proves its answer."""

    kind: str
    question: str
    answer: str  # word for word from the last document
    documents: tuple[Document, ...]  # those that are needed, in the order of reasoning
    evidence: tuple[str, ...]  # one sentence of each

    @property
    def id(self) -> str:
        """Hash of the wording: the same question has the same id wherever it is made."""
        return f"{self.kind}-{hashlib.sha1(self.question.encode(), usedforsecurity=False).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a sentence that may be asked for. `target`: number of the document whose title it is, else -1."""

    start: int
    end: int
    target: int = -1


def is_name(name: str) -> bool:
    """Whether a title can be told from common words: it has a capital, and two words or five letters."""
    return name[:1].isupper() and (len(name.split()) > 1 or (len(name) >= 5 and name not in _CALENDAR))


class Maker:
    """Makes the questions of one set of documents; those of other sets are never seen.

    Args:
        prose: keys of the documents that are parts of a text of the user's: the title of such a one is a heading, and
            not what a sentence that begins with "It" is about, unless the text has it, too.
    """

    def __init__(self, documents: Sequence[Document], seed: int, prose: Collection[str] = ()) -> None:
        self.documents, self.seed = documents, seed
        self.names = [name_of(document.title) for document in documents]
        self.sentences = [
            whole_sentences(document.text) if document.key in prose else sentences(document.text)
            for document in documents
        ]
        self._prose = [document.key in prose for document in documents]
        numbers: dict[str, list[int]] = {}
        for number, name in enumerate(self.names):
            # "Signs (film)" is not what a text with the word Signs mentions.
            if is_name(name) and name == html.unescape(documents[number].title):
                numbers.setdefault(name, []).append(number)
        self._by_word: dict[str, list[tuple[tuple[str, ...], str, int]]] = {}
        for name, owners in numbers.items():
            words = tuple(WORD.findall(name))
            if len(owners) == 1 and words:  # two documents of one title could not be told apart
                self._by_word.setdefault(words[0], []).append((words, name, owners[0]))
        for entries in self._by_word.values():
            entries.sort(key=lambda entry: (-len(entry[0]), entry[1]))
        self._spans: dict[int, list[list[Span]]] = {}
        self._facts_of: dict[int, list[tuple[str, str, str]]] = {}
        self._comparisons = Comparisons(documents, self.names, [found[0] if found else "" for found in self.sentences])
        self._facts_asked = FactQuestions(documents, self.names, self.sentences, self._comparisons.noun)

    def questions(self, per_document: int) -> Iterator[Made]:
        """Yield at most `per_document` questions of each kind of every document, each question once."""
        seen = set[str]()
        for number, document in enumerate(self.documents):
            rng = random.Random(derive_seed("reading-questions", document.key, self.seed))
            kinds = self._clozes, self._chains, self._compared, self._asked_for
            for candidates in (of_kind(number, rng) for of_kind in kinds):
                kept = 0
                for made in candidates:
                    if kept == per_document:
                        break
                    if made.question not in seen and len(made.question) <= MOST_CHARACTERS:
                        seen.add(made.question)
                        kept += 1
                        yield made

    def _clozes(self, number: int, rng: random.Random) -> Iterator[Made]:
        document, name = self.documents[number], self.names[number]
        cut = self.sentences[number]
        places = [(place, sentence) for place, sentence in enumerate(cut) if self._usable(number, sentence)]
        rng.shuffle(places)
        others: list[tuple[str, Span]] = []
        asked_title = False
        for place, sentence in places:
            if (
                not asked_title
                and is_name(name)
                and len(name.split()) <= MOST_ANSWER_WORDS
                and has_words(sentence, name)
            ):
                asked_title = True
                text = clip(sentence.replace(name, BLANK))
                question = rng.choice(_TITLE_ASKED).format(text)
                if rng.random() < 0.5:
                    question = asked(text, BLANK, question_word(text, name, BLANK, document.text))
                yield Made(CLOZE, question, name, (document,), (sentence,))
            spans = self._spans_of(number)[place]
            if spans:
                others.append((sentence, rng.choice(spans)))
        for sentence, span in others:
            answer = sentence[span.start : span.end]
            text = clip(sentence[: span.start] + BLANK + sentence[span.end :])
            if has_words(text, answer) or has_words(document.title, answer):
                continue
            question = rng.choice(_IN_TITLE).format(title=document.title, text=text)
            if rng.random() < 0.5:
                question = asked_of(text, BLANK, question_word(text, answer, BLANK), name, self._is_subject(number))
            yield Made(CLOZE, question, answer, (document,), (sentence,))

    def _chains(self, number: int, rng: random.Random) -> Iterator[Made]:
        first = self.documents[number]
        for sentence, target in self._links(number, rng):
            second = self.documents[target]
            name = self.names[target]
            masked = clip(sentence.replace(name, BLANK))
            facts = [fact for fact in self._facts(target) if not has_words(first.text, fact[2])]
            if not facts or has_words(masked, name):
                continue
            fact, cue, answer = rng.choice(facts)
            question = rng.choice(_CHAINED).format(first=masked, cue=cue)
            blanked = fact.replace(f"{cue} {answer}", f"{cue} {BLANK}", 1)
            word = question_word(blanked, answer, BLANK)
            subject = named(masked, self.names[number]) if self._is_subject(number) else masked
            if rng.random() < 0.5 and (natural := chained(subject, clip(blanked), BLANK, word, name)):
                question = natural
            if has_words(question, answer):
                continue
            yield Made(CHAIN, question, answer, (first, second), (sentence, fact))

    def _compared(self, number: int, rng: random.Random) -> Iterator[Made]:
        for question, answer, other in self._comparisons.of(number, rng):
            pair = (number, other)
            first, second = (self.documents[one] for one in pair)
            evidence = (self.sentences[number][0], self.sentences[other][0])
            yield Made(COMPARISON, question, answer, (first, second), evidence)

    def _asked_for(self, number: int, rng: random.Random) -> Iterator[Made]:
        for question, answer, proof in self._facts_asked.of(number, self._links(number, rng), rng):
            documents = tuple(self.documents[one] for one, _ in proof)
            yield Made(FACT, question, answer, documents, tuple(sentence for _, sentence in proof))

    def _links(self, number: int, rng: random.Random) -> list[tuple[str, int]]:
        """Return (sentence, number of a document that it names), in any order."""
        links = [
            (sentence, span.target)
            for sentence, spans in zip(self.sentences[number], self._spans_of(number), strict=True)
            for span in spans
            if span.target >= 0 and self._usable(number, sentence)
        ]
        rng.shuffle(links)
        return links

    def _is_subject(self, number: int) -> bool:
        """Whether pronouns at the beginning of a document's sentences mean what its title says."""
        return not self._prose[number] or has_words(self.documents[number].text, self.names[number])

    def _usable(self, number: int, sentence: str) -> bool:
        fits = 6 <= len(sentence.split()) <= 60 and "\n" not in sentence and BLANK not in sentence
        return fits and (not self._prose[number] or is_one_sentence(sentence))

    def _facts(self, number: int) -> list[tuple[str, str, str]]:
        """Return (sentence, the words before a name, year or number, that itself) where those words stand once."""
        if number not in self._facts_of:
            self._facts_of[number] = list(self._find_facts(number))
        return self._facts_of[number]

    def _find_facts(self, number: int) -> Iterator[tuple[str, str, str]]:
        document, name = self.documents[number], self.names[number]
        for sentence, spans in zip(self.sentences[number], self._spans_of(number), strict=True):
            if not self._usable(number, sentence):
                continue
            for span in spans:
                words = sentence[: span.start].split()[-4:]
                cue, answer = " ".join(words), sentence[span.start : span.end]
                if len(words) < 2 or has_words(cue, name) or has_words(name, answer):
                    continue
                if f"{cue} " in sentence and document.text.count(cue) == 1:
                    yield sentence, cue, answer

    def _spans_of(self, number: int) -> list[list[Span]]:
        """Return what may be asked for in every sentence of a document: titles of others before names and numbers."""
        if number not in self._spans:
            own = self.names[number]
            self._spans[number] = [self._find(sentence, number, own) for sentence in self.sentences[number]]
        return self._spans[number]

    def _find(self, sentence: str, number: int, own: str) -> list[Span]:
        found = list(self._mentions(sentence, number))
        for match in (*_NAME.finditer(sentence), *_NUMBER.finditer(sentence)):
            end = match.end()
            start = name_start(sentence, match.start(), end)
            text = sentence[start:end]
            if text[:1].isdigit() and not number_word(sentence[:start], text, sentence[end:]):
                continue
            if start >= end or (text[0].isupper() and " " not in text) or len(text.split()) > MOST_ANSWER_WORDS:
                continue
            if _overlaps(start, end, found) or has_words(own, text) or has_words(text, own):
                continue
            found.append(Span(start, end))
        return sorted(found, key=lambda span: span.start)

    def _mentions(self, sentence: str, number: int) -> Iterator[Span]:
        words = list(WORD.finditer(sentence))
        texts = tuple(match[0] for match in words)
        place = 0
        while place < len(words):
            for tokens, name, target in self._by_word.get(texts[place], ()):
                if texts[place : place + len(tokens)] != tokens or target == number:
                    continue
                start = words[place].start()
                if sentence[start : start + len(name)] != name or (place == 0 and len(tokens) == 1):
                    continue  # a first word has a capital, whatever it means
                if len(tokens) <= MOST_ANSWER_WORDS:
                    yield Span(start, start + len(name), target)
                place += len(tokens) - 1
                break
            place += 1


def _overlaps(start: int, end: int, spans: Iterable[Span]) -> bool:
    return any(start < span.end and span.start < end for span in spans)
