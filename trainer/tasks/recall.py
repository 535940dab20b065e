"""Multi-chunk recall: facts `KEY value .` scattered over chunks, one of which the question asks for.

The memory has room for one fact and the document holds many, so the agent must decide at every chunk what is worth
the space. Chunks are exactly `3 * facts + fillers` words, one word is one token of the tiny model's vocabulary, and a
fact never straddles two chunks.

Held-out tasks ask for (key, value) pairs that no training document ever shows, chosen by hash: a fifth of all
pairs, half of them for choosing settings (dev) and half for reporting (test).
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TypeVar

from trainer.config_tasks import WordsConfig
from trainer.seeding import unit_interval
from trainer.tasks.base import GeneratedSource
from trainer.types import Evidence, Task

Fact = tuple[str, str]
"""Key and value."""
W = TypeVar("W", bound=WordsConfig)

VALUES = (
    "lamp chair table spoon kettle ladder basket bottle hammer mirror pillow carpet clock candle window door wheel "
    "bucket button ribbon pencil ticket wallet jacket helmet guitar violin camera magnet anchor lantern compass apple "
    "bread butter cheese lemon onion pepper potato tomato carrot sugar honey garlic rice salt soup cake biscuit "
    "orange banana cherry grape peach plum melon walnut almond tiger rabbit horse sheep goat donkey monkey parrot "
    "eagle falcon sparrow pigeon spider beetle dolphin salmon turtle lizard camel zebra giraffe hammock blanket "
    "curtain cushion mattress drawer shelf cupboard teapot saucer napkin whistle trumpet drum piano flute harp rocket "
    "tractor bicycle scooter wagon ferry canoe kayak sled tunnel tower castle temple cottage cabin garage marble "
    "diamond ruby pearl copper bronze silver cotton velvet leather paper feather thimble needle zipper"
).split()
FILLERS = (
    "meanwhile later there was a calm afternoon and people walked along the river talking of weather while somebody "
    "played music near town until evening came again with rain over hills then birds returned children laughed shops "
    "closed early trains passed slowly through fields nobody noticed how long it took before lights went out every "
    "gate seemed open"
).split()
NO_FACT = "none"

HELD_OUT_SHARE = 0.2


@lru_cache(maxsize=8)
def make_keys(count: int) -> tuple[str, ...]:
    """`count` distinct pronounceable names: bako, dilu, … (there are 5,623)."""
    consonants, vowels = "bdfgjklmnprstvz", "aeiou"
    syllables = [c + v for c in consonants for v in vowels]
    names = [a + b for a in syllables for b in syllables]
    random.Random(7).shuffle(names)
    reserved = {*VALUES, *FILLERS, NO_FACT}
    names = [n for n in names if n not in reserved]
    if count > len(names):
        raise ValueError(f"task.num_keys={count} is more than the {len(names)} names there are: lower it")
    return tuple(names[:count])


def pair_split(fact: Fact) -> str:
    """Which split may ask for (and, for train, show) a fact: train, dev or test."""
    share = unit_interval("recall-split", *fact)
    if share >= HELD_OUT_SHARE:
        return "train"
    return "dev" if share < HELD_OUT_SHARE / 2 else "test"


def sentence_of(fact: Fact) -> str:
    """Return the words that tell a fact."""
    return "{} {} .".format(*fact)


class Recall(GeneratedSource[W]):
    """TaskSource of generated recall documents."""

    train_seed, heldout_seed = "train", "recall-heldout"

    def __init__(self, config: W, seed: int) -> None:
        super().__init__(config, seed)
        self.keys = make_keys(config.num_keys)
        self.values = tuple(VALUES[: config.num_values])

    @property
    def chance(self) -> float:
        """Accuracy of a blind guess of the value."""
        return 1.0 / self.config.num_values

    def vocabulary(self) -> list[str]:
        """Every word a document, question or answer can hold, in a fixed order."""
        return [*self.keys, *self.values, *sorted(set(FILLERS)), ".", NO_FACT]

    def fact(self, rng: random.Random, split: str, key: str, used: set[str]) -> Fact:
        """A fact about `key` that `split` may show and whose value is not in `used` (which it extends)."""
        while True:
            fact = (key, rng.choice(self.values))
            if fact[1] not in used and pair_split(fact) == split:
                used.add(fact[1])
                return fact

    def section(self, rng: random.Random, facts: list[Fact]) -> str:
        """One chunk: the facts and the filler words in random order."""
        parts = [sentence_of(fact) for fact in facts]
        parts += rng.choices(FILLERS, k=self.config.filler_per_chunk)
        rng.shuffle(parts)
        return " ".join(parts)

    def _make(self, task_id: str, split: str, rng: random.Random, chunks: int) -> Task:
        config = self.config
        count = chunks or rng.randint(config.min_chunks, config.max_chunks)
        gold_chunk = rng.randrange(count)
        question, *others = self._draw_keys(rng, count * config.facts_per_chunk)
        gold: Fact | None = None
        sections = []
        for number in range(count):
            used: set[str] = set()
            facts: list[Fact] = []
            if number == gold_chunk:
                gold = self.fact(rng, split, question, used)
                facts.append(gold)
            while len(facts) < config.facts_per_chunk:
                facts.append(self.fact(rng, "train", others.pop(), used))
            sections.append(self.section(rng, facts))
        assert gold is not None
        return Task(
            id=task_id,
            question=question,
            answers=(gold[1],),
            chunks=tuple(sections),
            meta={"chunks": count, "gold_chunk": gold_chunk},
            evidence=(Evidence("", sentence_of(gold)),),
        )

    def _draw_keys(self, rng: random.Random, count: int) -> list[str]:
        """The question's key first, then others; distinct as far as there are keys, the question's key never again."""
        first, *rest = rng.sample(self.keys, min(count, len(self.keys)))
        while len(rest) < count - 1:
            rest.extend(
                rng.sample([k for k in self.keys if k != first], min(count - 1 - len(rest), len(self.keys) - 1))
            )
        return [first, *rest]
