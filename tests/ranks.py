"""What every rank of the multi-rank tests runs: the same steps as one rank alone, and a report of where they led."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from builders import (
    Parts,
    group_rows,
    grouped_query_lm,
    learner,
    parameters,
    sampled_rows,
    small_config,
    small_parts,
)

from trainer.agents.template import encode
from trainer.evaluate import EvalSpec, evaluate
from trainer.rollout.controller import RolloutController
from trainer.rollout.sampler import shared_groups
from trainer.train.distributed import World, join_world, leave_world
from trainer.train.learner import Learner
from trainer.types import Completion, Row, SamplingParams, Task
from trainer.weights.inprocess import refresh, sampling_copy

# With a large epsilon AdamW's step is nearly linear in the gradient: a wrong scale shows, rounding is not blown up.
LINEAR = ("train.eps=1.0", "train.learning_rate=0.1", "train.weight_decay=0.1", "train.grad_clip=1e9")

RIGHT = "lamp"

# name -> (model, rows, settings)
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tied": ("llama", 9, ("train.max_tokens_per_mb=64",)),
    "grouped_query": ("qwen2", 9, ("train.max_tokens_per_mb=64",)),
    "empty_micro_batch": ("llama", 3, ("train.max_tokens_per_mb=50",)),
    "idle_rank": ("qwen2", 1, ()),
    "shared": ("qwen2", 0, ("train.max_tokens_per_mb=90",)),
    "whole_rows": ("qwen2", 0, ("train.max_tokens_per_mb=90", "train.share_prefixes=false")),
    "clipped": ("qwen2", 7, ("train.grad_clip=0.05", "algorithm.name=gspo", "algorithm.kl_coef=0.3")),
}


# What the rows of a case without a number of rows share: a group that is more than one micro-batch, one that lost
# members, one of a single row.
GROUPS = [(40, [(3, 5), (9, 2), (1, 8), (4, 4), (12, 3), (2, 6)]), (24, [(5, 5), (1, 7)]), (30, [(6, 6)])]


def case_rows(lm: Any, count: int, seed: int) -> list[Row]:
    rows = sampled_rows(lm, count, lm.config.vocab_size, seed=seed) if count else group_rows(lm, GROUPS, seed)
    for row in rows:
        row.ref_logprobs = [p - 0.3 for p in row.behave_logprobs]
    return rows


def run_case(world: World, name: str) -> dict[str, Any]:
    """Two optimizer steps, then the log-probs under the new weights."""
    model, count, settings = CASES[name]
    lm = small_parts().lm if model == "llama" else grouped_query_lm()
    batches = [case_rows(lm, count, seed) for seed in (0, 1)]
    one = learner(lm, small_config(*LINEAR, *settings), world)
    stats = [one.step(rows).values for rows in batches]
    return {"parameters": parameters(one), "stats": stats, "logprobs": one.logprobs(batches[0])}


def run_poisoned(world: World) -> dict[str, Any]:
    """A gradient that is not finite on the one rank that holds the row."""
    lm = grouped_query_lm()
    one = learner(lm, small_config(*LINEAR), world)
    before = parameters(one)
    rows = case_rows(lm, 5, 0)
    rows[3].advantage = math.nan
    stepped = one.step(rows).stepped
    after = parameters(one)
    return {"stepped": stepped, "unchanged": all(torch.equal(before[n], after[n]) for n in before)}


def run_published(world: World) -> dict[str, Any]:
    """The sampling weights after a step, in several processes gathered from the shards."""
    lm = small_parts().lm
    replica = sampling_copy(lm, world)
    one = Learner(lm, small_config(*LINEAR), world, total_optimizer_steps=10)
    one.step(case_rows(replica, 5, 0))
    refresh(replica, one.policy, world)
    return {n: p.detach().clone() for n, p in replica.named_parameters()}


class SameAnswer:
    """A fake engine: writes one and the same boxed word to everything, and counts."""

    version = 0
    asked = 0

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        self.asked += 1
        return Completion(list(self.ids), [-1.0] * len(self.ids), "length", 0)


class EveryThird:
    """Held-out tasks whose answer is RIGHT in every third."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def num_heldout(self, split: str) -> int:
        return self.parts.source.num_heldout(split)

    def heldout(self, split: str, index: int, chunks: int = 0) -> Task:
        task = self.parts.source.heldout(split, index, chunks)
        return dataclasses.replace(task, answers=(RIGHT if index % 3 == 0 else "no such word",))


def run_evaluation(world: World) -> dict[str, Any]:
    """Seven tasks over the ranks."""
    parts = small_parts()
    engine = SameAnswer(encode(parts.tokenizer, f"\\boxed{{ {RIGHT} }}"))
    controller = RolloutController(parts.agent, engine, seed=1)
    roll = partial(shared_groups, controller, world)
    result = evaluate(roll, EveryThird(parts), EvalSpec("dev", 7, chunks=2))
    return {
        "accuracy": result.accuracy,
        "em": result.metrics["em"],
        "num_tasks": result.num_tasks,
        "asked": world.gather(engine.asked),
    }


def run_all(world: World) -> dict[str, Any]:
    return {
        **{name: run_case(world, name) for name in CASES},
        "poisoned": run_poisoned(world),
        "published": run_published(world),
        "evaluation": run_evaluation(world),
        "agreed": [world.any(world.rank == 1), world.any(False), world.gather(world.rank)],
    }


def main(rank: int, size: int, folder: Path) -> None:
    """Entry point of a rank's process."""
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    torch.save(run_all(world), folder / f"rank{rank}.pt")
    leave_world(world)
