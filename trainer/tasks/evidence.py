"""The sentences that prove an answer: those that the data name, else one of each gold document, chosen by rule."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

from trainer.tasks.hotpotqa_data import Document, Question
from trainer.types import Evidence

_BOUNDARY = re.compile(r"[.!?][\"”\u2019')\]]*\s+(?=[\"“\u2018'(\[]?[A-Z0-9])")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"“])(?:[A-Z]|(?:[A-Za-z]\.)+[A-Za-z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|No|vs|Prof|Gen|Col|Lt|Sgt|Capt|Rev|Gov|Sen|"
    r"Rep|Inc|Ltd|Co|Corp|Mt|Ft|approx|ca|c)\.$"
)
MOST_SENTENCES = 2
"""Of a memory that has sentences that mislead, too, where a trace says no other number."""
WORD = re.compile(r"\w+(?:[\u2019'.&-]\w+)*")
_IN_BRACKETS = re.compile(r"\s*\([^)]*\)$")


def evidence_of(question: Question) -> tuple[Evidence, ...]:
    """Return a sentence of each gold document of a question."""
    gold, titles = question.gold, [document.title for document in question.gold]
    named = question.evidence or tuple(
        best_sentence(d, question.question, question.answers, [title for title in titles if title != d.title])
        for d in gold
    )
    return tuple(Evidence(d.title, sentence) for d, sentence in zip(gold, named, strict=True))


def sentences(text: str) -> list[str]:
    """Cut a text into sentences, which end with their line at the latest; abbreviations and initials end none."""
    return [sentence for line in text.split("\n") for sentence in _sentences_of_line(line)]


def _sentences_of_line(text: str) -> list[str]:
    found, start = [], 0
    for match in _BOUNDARY.finditer(text):
        if _ABBREVIATION.search(text[start : match.start() + 1]):
            continue
        found.append(text[start : match.end()].strip())
        start = match.end()
    found.append(text[start:].strip())
    return [sentence for sentence in found if sentence]


def name_of(title: str) -> str:
    """Return a title as texts mention it: without what tells it apart in brackets, and without HTML entities."""
    return _IN_BRACKETS.sub("", html.unescape(title)).strip()


def best_sentence(document: Document, question: str, answers: Iterable[str], other_titles: Iterable[str]) -> str:
    """Return the sentence of a document that helps most with a question, by rule.

    One that holds an answer comes first, then one that mentions the title of another document that is needed, then the
    one that shares most words with the question; the earlier of equals.
    """
    wanted = [answer for answer in answers if answer.lower() not in ("yes", "no")]
    names = [name_of(title) for title in other_titles]
    asked = {word.lower() for word in WORD.findall(question) if len(word) > 3}

    def worth(sentence: str) -> tuple[bool, bool, int]:
        low = sentence.lower()
        shared = len(asked & {word.lower() for word in WORD.findall(sentence)})
        return (
            any(has_words(low, one.lower()) for one in wanted),
            any(has_words(sentence, name) for name in names),
            shared,
        )

    found = sentences(document.text) or [document.title]
    return max(found, key=worth)  # the first of equals


def has_words(text: str, part: str) -> bool:
    """Whether a text has the part as whole words."""
    place = text.find(part) if part else -1
    while place >= 0:
        end = place + len(part)
        if not (text[place - 1 : place].isalnum() if place else False) and not text[end : end + 1].isalnum():
            return True
        place = text.find(part, place + 1)
    return False
