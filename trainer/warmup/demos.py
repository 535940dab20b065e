"""Demonstrations for the tiny model: what the warm-up shows, and what it leaves to reinforcement learning.

They show how to find the needed fact in one section whatever the memory holds (nothing, another key, another value for
the key), to write `KEY none` when the section lacks it, and to answer from the memory. The demonstrator reads sections
one by one: when the memory holds the needed fact and the section lacks it, it still writes what the section says (`KEY
none`), and keeps the memory only in `carry_share` of the cases. That keeping a fact pays is for reinforcement learning
to find out.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from trainer.agents.memagent import MemAgent
from trainer.agents.template import encode
from trainer.config import RunConfig
from trainer.seeding import derive_seed
from trainer.tasks.recall import NO_FACT, Fact, Recall
from trainer.types import Row

# Share of each kind of conversation in a batch.
FIND, MISS, CARRY, ANSWER = 0.40, 0.15, 0.20, 0.20  # the rest: answering from a memory without the fact

RECALL_FACTS, RECALL_QUERIES = 4, 6


class Demonstrations(ABC):
    """Training rows of the two phases, from the task's training facts; every batch is a function of its seed parts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def conversations(self, count: int, *seed_parts: str | int) -> list[Row]:
        """`count` demonstrated conversations; weight 1 on every response token."""
        rng = random.Random(derive_seed(*seed_parts))
        return [self._conversation(rng) for _ in range(count)]

    @abstractmethod
    def recall_rows(self, count: int, *seed_parts: str | int) -> tuple[list[Row], list[float]]:
        """Dense practice: rows, and a weight for every response token."""

    @abstractmethod
    def _conversation(self, rng: random.Random) -> Row: ...

    def _ids(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)


class Demonstrator(Demonstrations):
    """Demonstrations for the agent that overwrites its memory."""

    def __init__(self, config: RunConfig, recall: Recall[Any], agent: MemAgent, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.recall, self.agent, self.carry_share = recall, agent, config.warmup.carry_share

    def recall_rows(self, count: int, *seed_parts: str | int) -> tuple[list[Row], list[float]]:
        """Dense lookup practice: four facts in the prompt, six of them in the response.

        Returns:
            `count` rows, and a weight for every response token: 1 on the value, 0 on key and full stop.
        """
        rng = random.Random(derive_seed(*seed_parts))
        rows, weights = [], []
        for _ in range(count):
            facts = self._facts(rng, RECALL_FACTS)
            prompt = self._ids(self.recall.section(rng, facts))
            # Drawn with replacement: each fact exactly once could be answered by elimination.
            response = self._ids(" ".join(f"{k} {v} ." for k, v in rng.choices(facts, k=RECALL_QUERIES)))
            rows.append(_row(prompt, response))
            weights += [0.0, 1.0, 0.0] * RECALL_QUERIES
        return rows, weights

    def _facts(self, rng: random.Random, count: int) -> list[Fact]:
        used: set[str] = set()
        return [self.recall.fact(rng, "train", key, used) for key in rng.sample(self.recall.keys, count)]

    def _conversation(self, rng: random.Random) -> Row:
        size = self.recall.config.facts_per_chunk
        needed, stale, *others = self._facts(rng, size + 2)
        key = needed[0]
        found, missing = " ".join(needed), f"{key} {NO_FACT}"
        other_value = " ".join(self.recall.fact(rng, "train", key, {needed[1]}))
        before = rng.choice((NO_FACT, missing, " ".join(stale)))
        with_fact = self.recall.section(rng, [needed, *others[1:]])
        without = self.recall.section(rng, others)
        kind = rng.random()
        if kind < FIND:
            return self._update(key, rng.choice((before, before, before, other_value)), with_fact, found)
        if kind < FIND + MISS:
            return self._update(key, before, without, missing)
        if kind < FIND + MISS + CARRY:
            return self._update(key, found, without, found if rng.random() < self.carry_share else missing)
        if kind < FIND + MISS + CARRY + ANSWER:
            return self._final(key, found, " ".join(needed[1:]))
        return self._final(key, missing, NO_FACT)

    def _update(self, key: str, memory: str, section: str, response: str) -> Row:
        values = {"problem": self._ids(key), "memory": self._ids(memory), "section": self._ids(section)}
        return _row(self.agent.prompts.update.fill(values), [*self._ids(response), self.tokenizer.eos_token_id])

    def _final(self, key: str, memory: str, answer: str) -> Row:
        values = {"problem": self._ids(key), "memory": self._ids(memory)}
        response = [*self._ids(f"\\boxed{{ {answer} }}"), self.tokenizer.eos_token_id]
        return _row(self.agent.prompts.final.fill(values), response)


def _row(prompt: list[int], response: list[int]) -> Row:
    return Row(prompt, response, [0.0] * len(response), advantage=1.0, weight=1.0, trajectory=0)
