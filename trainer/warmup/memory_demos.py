"""Demonstrations for the tiny model that keeps a structured memory: how to write a call, and little more.

Dense practice comes first: all facts of a section in their order, one call each, and the end. The demonstrations then
show one call for the first fact of a section, and the end; a share of them (`carry_share`) writes all facts. So greedy
decoding after the warm-up keeps one fact of every section. That the others are asked for, too, is for reinforcement
learning to find out.
"""

from __future__ import annotations

import random
from typing import Any

from trainer.agents.memalpha import MemAlpha
from trainer.agents.memalpha_prompt import NO_MEMORY
from trainer.config import RunConfig
from trainer.seeding import derive_seed
from trainer.tasks.facts import Facts
from trainer.tasks.recall import Fact
from trainer.types import Row
from trainer.warmup.demos import Demonstrations

# Words without a blank, so that each is one token; with the words of a fact between them they make a call.
CALL_BEGINS = '{"name":"new_memory_insert","arguments":{"memory_type":"semantic","content":"'
CALL_ENDS = '"}}'
CALL_WORDS = ("<tool_call>", CALL_BEGINS, CALL_ENDS, "</tool_call>")


def call_text(fact: Fact) -> str:
    """The call that keeps a fact."""
    return f"<tool_call> {CALL_BEGINS} {fact[0]} {fact[1]} {CALL_ENDS} </tool_call>"


class MemoryDemonstrator(Demonstrations):
    """Demonstrations for the agent that keeps a structured memory."""

    def __init__(self, config: RunConfig, facts: Facts, agent: MemAlpha, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.facts, self.agent = facts, agent
        self.more_share = config.warmup.carry_share
        self.size = facts.config.facts_per_chunk
        self.shown = agent.config.shown_items

    def recall_rows(self, count: int, *seed_parts: str | int) -> tuple[list[Row], list[float]]:
        """Dense copying practice: all facts of the section in order; words that every call has weigh 0.2."""
        rng = random.Random(derive_seed(*seed_parts))
        rows = [self._turn(rng, self.size) for _ in range(count)]
        common = {i for word in CALL_WORDS for i in self._ids(word)}
        return rows, [0.2 if i in common else 1.0 for row in rows for i in row.response_ids]

    def _conversation(self, rng: random.Random) -> Row:
        return self._turn(rng, self.size if rng.random() < self.more_share else 1)

    def _turn(self, rng: random.Random, kept: int) -> Row:
        before, used = rng.randint(0, self.shown), set[str]()
        keys = rng.sample(self.facts.keys, self.size + before)
        drawn = [self.facts.fact(rng, "train", key, used) for key in keys]
        facts, earlier = drawn[: self.size], drawn[self.size :]
        section = self.facts.section(rng, facts)
        words = section.split()
        in_order = sorted(facts, key=lambda fact: words.index(fact[0]))
        memory = " ".join(" ".join(fact) for fact in earlier) or NO_MEMORY
        response = " ".join(call_text(fact) for fact in in_order[:kept])
        values = {"memory": self._ids(memory), "section": self._ids(section)}
        ids = [*self._ids(response), self.tokenizer.eos_token_id]
        prompt = self.agent.prompts.template.fill(values)
        return Row(prompt, ids, [0.0] * len(ids), advantage=1.0, weight=1.0, trajectory=0)
