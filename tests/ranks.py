"""What every rank of the multi-rank tests runs: the same steps as one rank alone, and a report of where they led."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.rollout.sampler import EmbeddedSampler, shared_groups
from trainer.schedule import Schedule
from trainer.train import chunks
from trainer.train.distributed import World, join_world, leave_world
from trainer.train.learner import Learner, RowCount
from trainer.train.microbatches import LEAST_SHARED, share_out
from trainer.train.model import copy_in
from trainer.train.prefixes import prefix_groups
from trainer.train.shares import Plan
from trainer.types import Completion, Group, Row, SamplingParams, Task, Trajectory, Turn, TurnRewards
from trainer.weights.source import refresh

# With a large epsilon AdamW's step is nearly linear in the gradient: a wrong scale shows, rounding is not blown up.
LINEAR = ("train.eps=1.0", "train.learning_rate=0.1", "train.weight_decay=0.1", "train.grad_clip=1e9")

RIGHT = "lamp"

Groups = list[tuple[int, list[tuple[int, int]]]]
"""Of each group the tokens that its rows share, and of each row the prompt's further tokens and the response's."""
# A group that is more than one micro-batch, one that lost members, one of a single row.
GROUPS: Groups = [(40, [(3, 5), (9, 2), (1, 8), (4, 4), (12, 3), (2, 6)]), (24, [(5, 5), (1, 7)]), (30, [(6, 6)])]


def random_groups(seed: int) -> Groups:
    """One to four groups of 1 to 16 rows, each of 90 tokens at most; all but single rows share enough."""
    draw = random.Random(seed)
    members = [[(draw.randint(1, 20), draw.randint(1, 9)) for _ in range(draw.randint(1, 16))] for _ in range(4)]
    return [(draw.randint(LEAST_SHARED, 60), rows) for rows in members[: draw.randint(1, 4)]]


RANDOM = range(4)
# name -> (model, number of rows or groups of them, settings)
CASES: dict[str, tuple[str, int | Groups, tuple[str, ...]]] = {
    "tied": ("llama", 9, ("train.max_tokens_per_mb=64",)),
    "grouped_query": ("qwen2", 9, ("train.max_tokens_per_mb=64",)),
    "empty_micro_batch": ("llama", 3, ("train.max_tokens_per_mb=50",)),
    "idle_rank": ("qwen2", 1, ()),
    "shared": ("qwen2", GROUPS, ("train.max_tokens_per_mb=90",)),
    "long_rows": ("qwen2", GROUPS, ("train.max_tokens_per_mb=50", "model.gradient_checkpointing=chunked")),
    "whole_rows": ("qwen2", GROUPS, ("train.max_tokens_per_mb=90", "train.share_prefixes=false")),
    "clipped": ("qwen2", 7, ("train.grad_clip=0.05", "algorithm.name=gspo", "algorithm.kl_coef=0.3")),
    # Borders of micro-batches fall inside of groups.
    **{f"random_{n}": ("qwen2", random_groups(n), ("train.max_tokens_per_mb=90",)) for n in RANDOM},
    **{
        f"random_{n}_whole": ("qwen2", random_groups(n), ("train.max_tokens_per_mb=90", "train.share_prefixes=false"))
        for n in RANDOM
    },
}


def case_rows(lm: Any, rows_of: int | Groups, seed: int) -> list[Row]:
    if isinstance(rows_of, int):
        rows = sampled_rows(lm, rows_of, lm.config.vocab_size, seed=seed)
    else:
        rows = group_rows(lm, rows_of, seed)
    for row in rows:
        row.ref_logprobs = [p - 0.3 for p in row.behave_logprobs]
    return rows


def run_case(world: World, name: str, held: bool = False) -> dict[str, Any]:
    """Two optimizer steps, then the log-probs under the new weights.

    held: all ranks have all rows, as Python objects, and each plans by itself; else rank 0 has them and sends them.
    """
    model, count, settings = CASES[name]
    lm = small_parts().lm if model == "llama" else grouped_query_lm()
    batches = [case_rows(lm, count, seed) if held or world.is_main else [] for seed in (0, 1)]
    one = learner(lm, small_config(*LINEAR, *settings), world)
    with held_by_all(one) if held else nullcontext():
        stats = [one.step(rows).values for rows in batches]
        return {"parameters": parameters(one), "stats": stats, "logprobs": one.logprobs(batches[0])}


@contextmanager
def held_by_all(one: Learner) -> Iterator[None]:
    """Each rank plans over all rows by itself, and takes its own from among them."""

    def plan(rows: list[Row]) -> Plan:
        groups, lengths = prefix_groups(rows, one.shares_prefixes), [row.num_tokens for row in rows]
        return share_out(groups, lengths, one.world.data_size, one.config.train.max_tokens_per_mb)

    def own(rows: list[Row], _: Plan, world: World) -> list[list[Row]]:
        return [[rows[i] for i in members] for members in plan(rows)[world.rank // world.tensor_size]]

    one._plan = lambda rows, measured=False: (plan(rows) if one.world.is_main else [], RowCount(len(rows)))
    with mock.patch("trainer.train.learner.deal", own):
        yield


@dataclasses.dataclass(frozen=True)
class Counting(World):
    """Counts the bytes that rank 0 sends it."""

    received: list[int] = dataclasses.field(default_factory=list)

    def scatter(self, values: Sequence[Any]) -> Any:
        value = super().scatter(values)
        self.received.append(0 if self.is_main else len(pickle.dumps(value)))
        return value

    def broadcast(self, value: Any) -> Any:
        value = super().broadcast(value)
        self.received.append(len(pickle.dumps(value)))
        return value


def run_received(world: World) -> dict[str, Any]:
    """What each rank was sent for one step, and the tokens of its rows and of all."""
    lm = grouped_query_lm()
    counting = Counting(**{field.name: getattr(world, field.name) for field in dataclasses.fields(World)})
    rows = group_rows(lm, [(200, [(20, 30)] * 8), (150, [(40, 20)] * 4), (100, [(9, 9)])])
    one = learner(lm, small_config(*LINEAR), counting)
    one.step(rows if world.is_main else [])
    sent = sum(counting.received)
    one.logprobs(rows if world.is_main else [])
    return {"step": sent, "logprobs": sum(counting.received) - sent, "tokens": sum(row.num_tokens for row in rows)}


class ByLot:
    """A fake controller: every other task's trajectories differ, though only in the rewards of their turns."""

    meter = SimpleNamespace(take=lambda: 0.0)
    asks_others = False

    def run(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        return [Group(task, [self._one(task, sample) for sample in range(2)]) for task in tasks]

    def _one(self, task: Task, sample: int) -> Trajectory:
        turn = Turn("update", [1, 2], Completion([3], [-0.1], "stop", 0))
        own = [0.5, 0.5] if int(task.id.rpartition("-")[2]) % 2 else [float(sample), 1.0 - sample]
        return Trajectory(task.id, [turn, turn], 0.5, turn_rewards=TurnRewards(0.0, own))


def run_refilled(world: World) -> dict[str, Any]:
    """Groups of which a batch replaces those that nothing can be learned from."""
    parts = small_parts("rollout.refill=true", "train.total_steps=2")
    course = Schedule.of(parts.config, parts.source.train_size)
    sampler = EmbeddedSampler(parts.config, parts.source, course, parts.engine(), ByLot(), world, parts.lm, Any)
    groups = sampler.batch(1)
    return {
        "tasks": [group.task.id for group in groups],
        "next": sampler.cursor.next_task,
        "turns": [len(one.turns) for group in groups for one in group.trajectories],
        "rewards": [one.turn_rewards for group in groups for one in group.trajectories],
    }


def run_poisoned(world: World) -> dict[str, Any]:
    """A gradient that is not finite on the one rank that holds the row."""
    lm = grouped_query_lm()
    one = learner(lm, small_config(*LINEAR), world)
    before = parameters(one)
    rows = case_rows(lm, 5, 0) if world.is_main else []
    if rows:
        rows[3].advantage = math.nan
    stepped = one.step(rows).stepped
    after = parameters(one)
    return {"stepped": stepped, "unchanged": all(torch.equal(before[n], after[n]) for n in before)}


def run_published(world: World) -> dict[str, Any]:
    """The sampling weights after a step, in several processes gathered from the shards."""
    lm = small_parts().lm
    replica = lm if world.mesh is None else copy_in(lm, world.dtype)
    one = Learner(lm, small_config(*LINEAR), world, total_optimizer_steps=10)
    one.step(case_rows(replica, 5, 0) if world.is_main else [])
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
        "sent": run_sent(world),
    }


def run_sent(world: World) -> dict[str, Any]:
    """Cases with uneven shares: with rows that are sent as arrays, and with objects that every rank has."""
    names = ("shared", "whole_rows", "clipped", "empty_micro_batch")
    return {
        "arrays": {name: run_case(world, name) for name in names},
        "objects": {name: run_case(world, name, held=True) for name in names},
        "received": run_received(world),
        "refilled": run_refilled(world),
        "scattered": world.scatter([f"for {rank}" for rank in range(world.size)] if world.is_main else []),
        "collected": world.collect(world.rank),
    }


def sent(rank: int, size: int, folder: Path) -> None:
    """Entry point of a rank's process for `run_sent` alone."""
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    torch.save(run_sent(world), folder / f"rank{rank}.pt")
    leave_world(world)


def main(rank: int, size: int, folder: Path) -> None:
    """Entry point of a rank's process; pieces of chunked layers are short here and not in the test's own process."""
    torch.set_num_threads(1)
    chunks.CHUNK = 16
    world = join_world(rank, size, f"file://{folder}/rendezvous")
    torch.save(run_all(world), folder / f"rank{rank}.pt")
    leave_world(world)
