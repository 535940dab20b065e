"""What a reward asks of a reader, and the reader that needs no model."""

from __future__ import annotations

import re
from typing import Any, Protocol

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Lower-cased words of a text."""
    return _WORD.findall(text.lower())


class Unanswered(Exception):  # noqa: N818 (an outcome, not a mistake of ours)
    """A request that cannot be answered (too long, refused, unreadable); it is counted, never scored."""


class TooLate(Unanswered):
    """No server could answer the request in time, in several tries; the request itself may be fine."""


class Reader(Protocol):
    """Answers questions and judges. Every method may raise Unanswered, and RunError when no server answers any more."""

    async def answer(self, question: str, memory: dict[str, Any]) -> str:
        """The answer to a question from a memory: core text, and the entries of each store that fit the question."""

    async def agrees(self, question: str, gold: str, answer: str) -> bool:
        """Whether an answer says what the gold answer says."""

    async def worth_keeping(self, store: str, content: str, chunk: str) -> bool:
        """Whether an entry that was written after reading `chunk` is a valid entry of its store."""

    def counts(self) -> dict[str, float]:
        """Requests, cache hits, retries and unanswered requests since the last call, by name."""


class RuleReader:
    """Reader by rules, for memories of facts `KEY value …`: answers with what follows the question's words in an entry.

    It understands no language. An entry is worth keeping where its words are a passage of the chunk.
    """

    async def answer(self, question: str, memory: dict[str, Any]) -> str:
        """What follows the question in the newest entry that holds it, up to the full stop; else nothing."""
        question_words = question.split()
        entries = [*memory["semantic"].values(), *memory["episodic"].values()]
        for text in [*reversed(entries), memory["core"]]:
            words = text.split()
            for start in range(len(words) - len(question_words) + 1):
                if words[start : start + len(question_words)] == question_words:
                    rest = words[start + len(question_words) :]
                    return " ".join(rest[: rest.index(".")] if "." in rest else rest)
        return ""

    async def agrees(self, question: str, gold: str, answer: str) -> bool:  # noqa: ARG002 (as Reader)
        """The same words in the same order."""
        return words_of(gold) == words_of(answer)

    async def worth_keeping(self, store: str, content: str, chunk: str) -> bool:  # noqa: ARG002 (as Reader)
        """Whether the entry is a passage of the chunk."""
        return f" {' '.join(content.split())} " in f" {' '.join(chunk.split())} "

    def counts(self) -> dict[str, float]:
        """Nothing can go wrong here."""
        return {}
