"""Questions that compare two documents by what their first sentences say: who was born first, are both of one country.

People are compared by years, nationality and profession, other things by years and by what they are. Where the answer
is a title, the other title could be it as well, and nothing in the titles tells which it is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from clusterkit.data.datasets.asking import is_about_somebody
from trainer.tasks.hotpotqa_data import Document

_DAY = r"(?:\w+ \d{1,2}, |\d{1,2} \w+ )?"
_BORN = re.compile(rf"\((?:[^()]*[;,] )?(?:born {_DAY}(\d{{4}})\)|{_DAY}(\d{{4}}) *[-\u2013] *{_DAY}\d{{4}}\))")
_CLASS = re.compile(
    r" (?:is|was|are|were) (?:an? |the (?=(?:first|second|third|fourth|fifth|sixth|debut) ))(?:former |retired |late )?"
    r"((?:(?!(?:and|or|is|the|of|in|at|on|to|for|with) )[A-Za-z][\w-]* ){0,3}?[a-z][a-z-]+)"
    r"(?= (?:who|that|which|in|of|from|by|for|at|on|near|based|located|best|known|written|directed|created|published|"
    r"released|broadcast|built|born|formerly|originating)\b|\.|"
    r" and [a-z]+(?:[.,]| who| best| known| from)|, (?:an?|the|who|which|\w+ed|best|by|in)\b)"
)
_LEFT_OUT = re.compile(r"^(?:first|second|third|fourth|fifth|sixth|debut|self-titled) | [a-z]+ed$")
_VAGUE = frozenset(
    "first second third one member part type form kind name group series synthetic set list class cycle standard "
    "term word neologism capital man woman person people citizen civilian daughter son wife native east west north "
    "south result television stage attempt collection chain area private retelling system breed noble".split()
)
_NATIONS = frozenset(
    "American Argentine Australian Austrian Belgian Brazilian Bulgarian Canadian Chilean Chinese Colombian Croatian "
    "Cuban Czech Danish Dutch Egyptian Finnish French German Greek Hungarian Icelandic Indian Indonesian Iranian Irish "
    "Israeli Italian Jamaican Japanese Kenyan Korean Malaysian Mexican Nigerian Norwegian Pakistani Peruvian Polish "
    "Portuguese Romanian Russian Serbian Spanish Swedish Swiss Turkish Ukrainian Venezuelan Vietnamese".split()
)
_SOUNDS_LIKE_YOU = ("uni", "use", "eu", "one-")
_SINCE = re.compile(
    r" (?:is|was|are|were) an? (\d{4}) (?:[\w-]+ )*?(?:film|album|song|single|novel|book|series)\b|"
    r"\b(?:founded|formed|established|built|opened|released) in (\d{4})"
)
_EARLIER = (
    "Which came first, {} or {}?",
    "Which is older, {} or {}?",
    "Between {} and {}, which is from the earlier year?",
)
_IN_COMMON = ("What profession do {} and {} have in common?", "What do {} and {} both do for a living?")
_ORDERS = ("Who was born first, {} or {}?", "Who is older, {} or {}?")
_SAME_NATION = ("Are {} and {} of the same nationality?", "Were {} and {} both from the same country?")
TEMPLATES = (*_EARLIER, *_IN_COMMON, *_ORDERS, *_SAME_NATION)


class Comparisons:
    """Finds partners for documents. `first`: the first sentence of each document."""

    def __init__(self, documents: Sequence[Document], names: Sequence[str], first: Sequence[str]) -> None:
        self.names, self._first = names, [sentence.lower() for sentence in first]
        self._born: dict[int, int] = {}
        self._class: dict[int, str] = {}
        self._nation: dict[int, str] = {}
        self._since: dict[int, int] = {}
        self._profession: dict[int, str] = {}
        for number, (document, sentence) in enumerate(zip(documents, first, strict=True)):
            head = sentence.partition(names[number])
            if not head[1] or head[0] or document.title != names[number]:
                continue  # it does not begin with what it is about, or its title needs brackets to be told apart
            if (found := _CLASS.search(head[2])) is None:
                continue
            kind = _LEFT_OUT.sub("", found[1])
            nation, _, rest = kind.partition(" ")
            if nation in _NATIONS and rest:
                kind = rest
            if is_about_somebody(document.text):
                if born := _BORN.match(head[2].strip()):
                    self._born[number] = int(born[1] or born[2])
                    if kind.islower() and kind.split()[-1] not in _VAGUE and not kind.startswith("rules "):
                        self._profession[number] = kind
                    if nation in _NATIONS:
                        self._nation[number] = nation
            elif kind.split()[-1] not in _VAGUE and kind.split()[-1] not in names[number].lower():
                self._class[number] = kind
                if since := _SINCE.search(head[2]):
                    self._since[number] = int(since[1] or since[2])
        self._things: dict[str, list[int]] = {}
        for number, kind in self._class.items():
            self._things.setdefault(kind, []).append(number)
        self._people, self._of_nations = sorted(self._born), sorted(self._nation)
        self._dated = sorted(self._since)
        self._workers: dict[str, list[int]] = {}
        for number, kind in self._profession.items():
            self._workers.setdefault(kind, []).append(number)
        self._all_things = sorted(number for ones in self._things.values() for number in ones)

    def of(self, number: int, rng: random.Random) -> Iterator[tuple[str, str, int]]:
        """Yield (question, answer, number of the other document), at most one of each kind."""
        name = self.names[number]
        ordered = ((self._born, self._people, _ORDERS), (self._since, self._dated, _EARLIER))
        for year_of, ones, questions in ordered:
            if number in year_of and (other := _other(rng, ones, number)) is not None:
                years = year_of[number], year_of[other]
                if years[0] != years[1]:
                    answer = name if years[0] < years[1] else self.names[other]
                    yield self._asked(rng.choice(questions), number, other, rng), answer, other
        if number in self._profession and rng.random() < 0.5:
            kind = self._profession[number]
            if (other := _other(rng, self._workers[kind], number)) is not None:
                yield self._asked(rng.choice(_IN_COMMON), number, other, rng), kind, other
        if number in self._nation and rng.random() < 0.5:
            same = rng.random() < 0.5
            ones = [one for one in self._of_nations if (self._nation[one] == self._nation[number]) == same]
            if (other := _other(rng, ones, number)) is not None:
                yield self._asked(rng.choice(_SAME_NATION), number, other, rng), "yes" if same else "no", other
        if number in self._class and rng.random() < 0.5:
            yield from self._by_kind(number, rng)

    def noun(self, number: int) -> str:
        """Return what a document is about, by one word: "film" or "person"; empty where that is not known."""
        return "person" if number in self._born else self._class.get(number, "").rpartition(" ")[2]

    def _by_kind(self, number: int, rng: random.Random) -> Iterator[tuple[str, str, int]]:
        kind = self._class[number]
        same = rng.random() < 0.5 and len(self._things[kind]) > 1
        other = _other(rng, self._things[kind] if same else self._all_things, number)
        noun = kind.split()[-1]
        if other is None or noun in self.names[other].lower() or (not same and noun in self._first[other]):
            return
        article = "an" if kind[0].lower() in "aeiou" and not kind.lower().startswith(_SOUNDS_LIKE_YOU) else "a"
        if not same and rng.random() < 0.7:
            question, answer = f"Which is {article} {kind}, {{}} or {{}}?", self.names[number]
        else:
            question, answer = f"Are {{}} and {{}} both {article} {kind}?", "yes" if same else "no"
        yield self._asked(question, number, other, rng), answer, other

    def _asked(self, form: str, number: int, other: int, rng: random.Random) -> str:
        pair = [self.names[number], self.names[other]]
        rng.shuffle(pair)
        return form.format(*pair)


def _other(rng: random.Random, ones: Sequence[int], number: int) -> int | None:
    if not ones or list(ones) == [number]:
        return None
    while (other := rng.choice(ones)) == number:
        pass
    return other
