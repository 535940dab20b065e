"""The entries of a store that fit a question best, by BM25 over lower-cased words."""

from __future__ import annotations

import re
from functools import lru_cache

WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-cased words of a text."""
    return WORD.findall(text.lower())


class Ranking:
    """One store's entries, indexed once and asked many questions.

    BM25 in Lucene's form (Kamphuis et al. 2020), whose weights are never negative: with the few entries of a memory
    the original formula gives a word that half of them hold a weight of zero.
    """

    def __init__(self, entries: dict[str, str], top_k: int) -> None:
        self.entries, self.top_k = entries, top_k
        tokens = [words(text) for text in entries.values()]
        self._index = None
        if len(entries) > top_k and any(tokens):
            import bm25s  # noqa: PLC0415 (numpy and more, which a store of few entries has no use for)

            self._index = bm25s.BM25(method="lucene")
            self._index.index(tokens, show_progress=False)

    def best(self, question: str) -> dict[str, str]:
        """At most `top_k` entries, the best first; all of them, in order, where there are no more than that."""
        names = list(self.entries)
        if len(names) <= self.top_k:
            return dict(self.entries)
        if self._index is None:  # no entry holds a word
            return {name: self.entries[name] for name in names[: self.top_k]}
        known = [word for word in words(question) if word in self._index.vocab_dict]
        if not known:  # nothing to go by: the newest ones
            return {name: self.entries[name] for name in names[-self.top_k :]}
        found, _ = self._index.retrieve([known], k=self.top_k, show_progress=False)
        return {names[int(number)]: self.entries[names[int(number)]] for number in found[0]}


@lru_cache(maxsize=128)
def ranking_of(entries: tuple[tuple[str, str], ...], top_k: int) -> Ranking:
    """A store's ranking, kept for the next question: indexing some hundred entries takes as long as many questions."""
    return Ranking(dict(entries), top_k)
