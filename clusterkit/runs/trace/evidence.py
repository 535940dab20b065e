"""Gold sentences: in which sections they stand, and which of them a memory has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from trainer.rewards.qa import normalize, sub_em_1way
from trainer.rewards.reading import CLOSED

HELD_SHARE = 0.8
"""A memory has a sentence from this share of its words on: memories are seldom verbatim."""
_LOST = "\ufffd"
"""In place of a character whose bytes two sections share."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sentence, or a part of it, stands: number of the section from 1, and characters of its text."""

    section: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GoldSentence:
    """A sentence that proves the answer."""

    title: str  # of its document; "" without one
    sentence: str  # its text
    places: tuple[Place, ...] = ()  # where it was read; two where a section ends within it, none where it was not read


@dataclass(frozen=True, slots=True)
class Held:
    """What a memory has."""

    answer: bool | None  # whether a gold answer; None for yes and no, which stand in a memory by chance
    shares: tuple[float, ...]  # of each gold sentence, the share of its words

    @property
    def sentences(self) -> tuple[int, ...]:
        """Numbers of the gold sentences that it has, from 1."""
        return tuple(number for number, share in enumerate(self.shares, start=1) if share >= HELD_SHARE)

    def __str__(self) -> str:
        parts = [f"[{number}]" for number in self.sentences]
        return ", ".join(["the answer", *parts] if self.answer else parts)


def gold_of(record: dict[str, Any], sections: Sequence[str] = ()) -> tuple[GoldSentence, ...]:
    """Return the gold sentences of a record; none in those of earlier versions."""
    return tuple(
        GoldSentence(str(one["title"]), str(one["sentence"]), places_of(sections, one["title"], one["sentence"]))
        for one in record.get("evidence") or []
    )


def places_of(sections: Sequence[str], title: str, sentence: str) -> tuple[Place, ...]:
    """Find a sentence in the sections that were read, below its title where that helps to choose.

    Sections may be cut anywhere, within words too, and white space may differ.
    """
    text = "".join(sections)
    pattern = r"\s*".join("".join(map(_letter, word)) for word in sentence.split())
    found = [match.span() for match in re.finditer(pattern, text)] if pattern else []
    if not found:
        return ()
    start, end = next((span for span in found if title and _is_below(text, title, span[0])), found[0])
    places, began = [], 0
    for number, stop in enumerate(accumulate(map(len, sections)), start=1):
        if start < stop and end > began:
            places.append(Place(number, max(start, began) - began, min(end, stop) - began))
        began = stop
    return tuple(places)


def held(memory: str, answers: Sequence[str], sentences: Sequence[str]) -> Held:
    """Return what a memory has of the answer and of the gold sentences."""
    golds = [answer for answer in answers if normalize(answer) not in CLOSED]
    words = set(normalize(memory).split())
    return Held(bool(sub_em_1way(memory, golds)) if golds else None, tuple(_share(words, one) for one in sentences))


def _share(words: set[str], sentence: str) -> float:
    wanted = set(normalize(sentence).split())
    return round(len(wanted & words) / len(wanted), 3) if wanted else 0.0


def _letter(letter: str) -> str:
    return re.escape(letter) if letter.isascii() else f"(?:{letter}|{_LOST}+)"


def _is_below(text: str, title: str, start: int) -> bool:
    """Whether the title stands between the last heading of a document and the place."""
    return title in text[max(text.rfind("Document ", 0, start), 0) : start]
