"""RULER-style tasks of any length, generated: needles, variables, frequent words (Hsieh et al. 2024, arXiv 2404.06654).

Written anew after the paper's description, with a haystack of made sentences: no download, the same text for all, and
nothing that a model can know by heart. Scores are RULER-like, not RULER's. Lengths are in tokens of the
checkpoint's tokenizer (the document alone), met on average to about one per cent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from evaluation.suites.base import CountTokens, Suite
from trainer.seeding import derive_seed
from trainer.types import Task

ITEMS = 100
VERSION = 1
SENTENCES_A_PARAGRAPH = 6

_WHO = "baker carpenter teacher sailor gardener doctor painter farmer clerk weaver miller singer".split()
_DID = "opened closed painted moved washed repaired counted carried watched ordered".split()
_WHAT = "window ladder basket door bench barrel table carpet lantern wagon".split()
_WHEN = ("before noon", "after the rain", "at dawn", "in the evening", "on a quiet day", "without a word", "as usual")
_LEFT = "amber brisk calm dusty eager faint gentle hollow iron jolly keen lively mellow narrow pale rusty".split()
_RIGHT = "anchor bridge candle desert engine falcon garden harbor island jungle kettle meadow needle orchard".split()
_SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe ri so tu va we xi yo zu".split()

Fill = Callable[[random.Random, int], list[str]]
"""About so many tokens of haystack, as sentences."""
Build = Callable[[random.Random, int, Fill, CountTokens], tuple[str, tuple[str, ...], str]]
"""Question, expected strings and document of one item."""


def ruler_suite(task: str, tokens: int, limit: int = 0) -> Suite:
    """The suite TASK@TOKENS of one of `TASKS`. limit: only so many items; 0: ITEMS."""
    count = limit or ITEMS
    identity = {"kind": f"ruler-{task}", "version": VERSION, "tokens": tokens, "items": count}

    def load(count_tokens: CountTokens) -> list[Task]:
        fill = _filler(count_tokens)
        tasks = []
        for index in range(count):
            rng = random.Random(derive_seed("ruler", VERSION, task, tokens, index))
            question, answers, document = TASKS[task](rng, tokens, fill, count_tokens)
            tasks.append(Task(f"{task}-{tokens}-{index}", question, answers, document))
        return tasks

    return Suite(f"{task}@{tokens}", "strings", identity, load, True, 0, "generated")


def needles(
    rng: random.Random, tokens: int, fill: Fill, count: CountTokens, *, others: int = 0, values: int = 1, asked: int = 1
) -> tuple[str, tuple[str, ...], str]:
    """Magic numbers of things, hidden anywhere. others: things that are not asked for; values: numbers of each thing
    asked for; asked: things asked for.
    """
    names = rng.sample([f"{left} {right}" for left in _LEFT for right in _RIGHT], asked + others)
    wanted = [(name, _number(rng)) for name in names[:asked] for _ in range(values)]
    hidden = wanted + [(name, _number(rng)) for name in names[asked:]]
    lines = [f"One of the special magic numbers for {name} is: {number}." for name, number in hidden]
    document = _hide(rng, lines, fill(rng, tokens - count(" ".join(lines))))
    things = " and ".join(names[:asked])
    many = values * asked > 1
    question = (
        f"What are all the special magic numbers for {things} mentioned in the text?"
        if many
        else f"What is the special magic number for {things} mentioned in the text?"
    )
    return question, tuple(number for _, number in wanted), document


def variables(rng: random.Random, tokens: int, fill: Fill, count: CountTokens) -> tuple[str, tuple[str, ...], str]:
    """Variable tracking: which variables hold a value, through a chain of four assignments, beside another chain."""
    names = _distinct(rng, 10, lambda: "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)))
    value, other = (str(rng.randint(10000, 99999)) for _ in range(2))
    chains = [_chain(names[:5], value), _chain(names[5:], other)]
    # Both chains keep their order, however they are mixed.
    order = rng.sample([0] * 5 + [1] * 5, 10)
    lines = [chains[which].pop(0) for which in order]
    document = _hide(rng, lines, fill(rng, tokens - count(" ".join(lines))), keep_order=True)
    return f"Find all variables that are assigned the value {value} in the text above.", tuple(names[:5]), document


def common_words(rng: random.Random, tokens: int, fill: Fill, count: CountTokens) -> tuple[str, tuple[str, ...], str]:
    """Ten words of a numbered list that stand in it ten times as often as the others."""
    del fill
    words = _distinct(rng, 4000, lambda: "".join(rng.choices(_SYLLABLES, k=3)))
    entry = count(" ".join(f"{i}. {word}" for i, word in enumerate(words[:200], 1))) / 200
    entries = max(int(tokens / entry), 40)
    often = max(entries // 16, 2)
    rarely = max(often // 10, 1)
    rest = max((entries - 10 * often) // rarely, 1)
    words = _distinct(rng, 10 + rest, lambda: "".join(rng.choices(_SYLLABLES, k=4 if rest > 4000 else 3)))
    listed = [word for word in words[:10] for _ in range(often)] + [w for w in words[10:] for _ in range(rarely)]
    rng.shuffle(listed)
    document = "\n".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
    return "What are the 10 most common words in the list above?", tuple(words[:10]), document


def frequent_words(rng: random.Random, tokens: int, fill: Fill, count: CountTokens) -> tuple[str, tuple[str, ...], str]:
    """The three most frequent words of a coded text, whose frequencies fall as 1 / rank^2."""
    del fill
    words = _distinct(rng, 500, lambda: "".join(rng.choices(_SYLLABLES, k=3)))
    weights = [1 / rank**2 for rank in range(1, len(words) + 1)]
    each = count(" ".join(rng.choices(words, weights, k=1000))) / 1000
    total = max(int(tokens / each), 60)
    listed = [
        word for word, weight in zip(words, weights, strict=True) for _ in range(int(total * weight / sum(weights)))
    ]
    listed += ["..."] * (total - len(listed))
    rng.shuffle(listed)
    question = "What are the three most frequently appeared words in the coded text above? Do not count '...'."
    return question, tuple(words[:3]), " ".join(listed)


TASKS: dict[str, Build] = {
    "niah_single": needles,
    "niah_multikey": partial(needles, others=7),
    "niah_multivalue": partial(needles, values=4),
    "niah_multiquery": partial(needles, asked=4),
    "vt": variables,
    "cwe": common_words,
    "fwe": frequent_words,
}


def _filler(count: CountTokens) -> Fill:
    sample = random.Random(0)
    number = 100 * SENTENCES_A_PARAGRAPH
    each = count(_paragraphs([_sentence(sample) for _ in range(number)])) / number

    def fill(rng: random.Random, tokens: int) -> list[str]:
        return [_sentence(rng) for _ in range(max(int(tokens / each), 1))]

    return fill


def _sentence(rng: random.Random) -> str:
    return f"The {rng.choice(_WHO)} {rng.choice(_DID)} the {rng.choice(_WHAT)} {rng.choice(_WHEN)}."


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _chain(names: Sequence[str], value: str) -> list[str]:
    first = f"VAR {names[0]} = {value}."
    return [first, *(f"VAR {name} = VAR {before}." for before, name in pairwise(names))]


def _distinct(rng: random.Random, number: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < number:
        found.setdefault(make())
    words = list(found)
    rng.shuffle(words)
    return words


def _hide(rng: random.Random, lines: list[str], sentences: list[str], keep_order: bool = False) -> str:
    """The sentences with the lines among them at random places, in paragraphs."""
    places = sorted(rng.randint(0, len(sentences)) for _ in lines)
    if not keep_order:
        lines = rng.sample(lines, len(lines))
    mixed = list(sentences)
    for place, line in reversed(list(zip(places, lines, strict=True))):
        mixed.insert(place, line)
    return _paragraphs(mixed)


def _paragraphs(sentences: list[str]) -> str:
    size = SENTENCES_A_PARAGRAPH
    return "\n".join(" ".join(sentences[i : i + size]) for i in range(0, len(sentences), size))
