"""A document of any length as sections of token ids, read from its file block by block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from trainer.agents.template import encode
from trainer.config_agents import ChunksAgentConfig
from trainer.errors import UserError

BLOCK = 1 << 20
"""Characters that are tokenised at a time. A shorter document has the very sections of an evaluation's."""


class UnknownWords:
    """Words of texts that a tokenizer has no token for, so that the model reads all of them as the same one.

    Attributes:
        count: how many there are.
        first: the first few, each once.
    """

    SHOWN = 5

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.count, self.first = tokenizer, 0, list[str]()
        self._known: dict[str, bool] = {}

    def add(self, text: str, ids: list[int]) -> None:
        """Look at a text. ids: its tokens."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in ids:
            return
        for word in text.split():
            if word not in self._known:
                self._known[word] = unknown not in encode(self.tokenizer, word)
                if not self._known[word] and len(self.first) < self.SHOWN:
                    self.first.append(word)
            self.count += not self._known[word]


class Document:
    """Text of a file in the sections that an agent reads; the file is never in memory as a whole.

    Args:
        path: the text, in UTF-8.
        limits: the agent's: tokens of a section, most sections, and what to do with more.
        block: characters that are tokenised at a time.

    Attributes:
        unknown: words that the tokenizer does not know.
        left_out: tokens in the middle of it that are over the most sections.

    Raises:
        UserError: there are more sections than `limits.max_chunks`, and `limits.overflow` is "error".
    """

    def __init__(self, path: Path, tokenizer: Any, limits: ChunksAgentConfig, block: int = BLOCK) -> None:
        self.path, self.tokenizer, self.limits, self.block = path, tokenizer, limits, block
        self.unknown = UnknownWords(tokenizer)
        self.tokens = 0
        for text in self._texts():
            ids = encode(tokenizer, text)
            self.unknown.add(text, ids)
            self.tokens += len(ids)
        room = limits.max_chunks * limits.chunk_tokens
        self.left_out = max(self.tokens - room, 0) if room else 0
        if self.left_out and limits.overflow == "error":
            raise UserError(
                f"the document has {self._count(self.tokens)} sections and agent.max_chunks is {limits.max_chunks}: "
                "raise it (0: no limit), or set agent.overflow=center to read only the first and the last of them"
            )

    @property
    def num_sections(self) -> int:
        """How many sections are read."""
        return self._count(self.tokens - self.left_out)

    def sections(self) -> Iterator[list[int]]:
        """Token ids of each section; all but the last have the agent's full length."""
        size = self.limits.chunk_tokens
        waiting: list[int] = []
        for ids in self._kept():
            waiting += ids
            whole = len(waiting) - len(waiting) % size
            yield from (waiting[start : start + size] for start in range(0, whole, size))
            waiting = waiting[whole:]
        if waiting:
            yield waiting

    def _kept(self) -> Iterator[list[int]]:
        """Token ids by block, without what is left out of the middle."""
        first = self.limits.max_chunks * self.limits.chunk_tokens // 2 if self.left_out else self.tokens
        again = first + self.left_out
        place = 0
        for ids in self._blocks():
            yield ids[: max(first - place, 0)] + ids[max(again - place, 0) :]
            place += len(ids)

    def _blocks(self) -> Iterator[list[int]]:
        return (encode(self.tokenizer, text) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        with self.path.open(encoding="utf-8", newline="") as file:
            yield from blocks_of(file, self.block)

    def _count(self, tokens: int) -> int:
        return -(-tokens // self.limits.chunk_tokens)


def blocks_of(file: TextIO, size: int) -> Iterator[str]:
    """Text in pieces of at most about `size` characters, cut in front of white space so that no word is divided."""
    text = ""
    while more := file.read(size):
        text += more
        if len(text) < size:
            continue
        cut = _before_space(text)
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text


def _before_space(text: str) -> int:
    """The last place where white space follows a word; the end where there is none."""
    for place in range(len(text) - 1, 0, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return len(text)
