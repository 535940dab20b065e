"""Needles in a haystack for models that know English, after RULER's multi-key task (Hsieh et al., arXiv 2404.06654).

Every section has sentences that tell a number for a name, among others that tell nothing; the question asks for the
number of one name. Numbers are drawn anew for every document, so nothing can be known beforehand. The task cuts its own
sections, so that no sentence is torn.
"""

from __future__ import annotations

import random

from trainer.config_tasks import SectionsConfig
from trainer.tasks.base import GeneratedSource
from trainer.tasks.recall import make_keys
from trainer.types import Evidence, Task

NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
    "A train passed slowly through the fields.",
    "The river was calm in the afternoon.",
    "Somebody played music near the market.",
    "It rained over the hills until the evening.",
    "The shops closed early that day.",
    "Children laughed behind the old school.",
    "Nobody noticed how long it took.",
    "The birds returned before the winter.",
    "A gate stood open at the end of the road.",
    "People talked about the weather.",
    "The lights went out one after the other.",
)
NEEDLE = "The special magic number for {key} is {value}."
QUESTION = "What is the special magic number for {key}?"
HELD_OUT_KEYS = 0.2


class Needles(GeneratedSource[SectionsConfig]):
    """TaskSource of generated documents; names that held-out questions ask for are never asked for in training."""

    train_seed, heldout_seed = "needles", "needles-heldout"
    chance = 1e-5

    def __init__(self, config: SectionsConfig, seed: int) -> None:
        super().__init__(config, seed)
        names = [name.capitalize() for name in make_keys(max(config.num_keys, 64))]
        held = int(len(names) * HELD_OUT_KEYS)
        self._names = {"train": names[2 * (held // 2) :], "dev": names[: held // 2], "test": names[held // 2 : held]}

    def _make(self, task_id: str, split: str, rng: random.Random, chunks: int) -> Task:
        config = self.config
        count = chunks or rng.randint(config.min_chunks, config.max_chunks)
        target = rng.choice(self._names[split])
        others = [name for name in self._names["train"] if name != target]
        answer = str(rng.randint(10_000, 99_999))
        gold = rng.randrange(count)
        sections = []
        for number in range(count):
            needle_sentences = [
                NEEDLE.format(key=key, value=rng.randint(10_000, 99_999))
                for key in rng.sample(others, config.facts_per_chunk - (number == gold))
            ]
            if number == gold:
                needle_sentences.append(NEEDLE.format(key=target, value=answer))
            sentences = needle_sentences + rng.choices(NOISE, k=config.filler_per_chunk)
            rng.shuffle(sentences)
            sections.append(" ".join(sentences))
        return Task(
            id=task_id,
            question=QUESTION.format(key=target),
            answers=(answer,),
            chunks=tuple(sections),
            meta={"chunks": count, "gold_chunk": gold},
            evidence=(Evidence("", NEEDLE.format(key=target, value=answer)),),
        )
