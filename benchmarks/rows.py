"""How the rows of a step come from rank 0 to the ranks: each its own as arrays, or all of them to everyone as objects.

    python3 benchmarks/rows.py [--ranks 4] [--tokens 8e6] [--rounds 3]

Rows of MemAgent's 7B run (`memagent` of benchmarks/prefixes.py), gloo ranks on this machine. `arrays` is what the
trainer does: rank 0 makes arrays of its lists, finds common prefixes, plans, and sends every rank its share. `objects`
is what it did before: rank 0 broadcasts every turn, and each rank makes its rows, finds prefixes and plans by itself.

A JSON object each, of the fastest round. `step_s` is the time until the last rank has its micro-batches, the others are
parts of it, on rank 1 unless named after rank 0. Bytes are rank 1's in the first round, over all tokens of the step.
Last the ratios, objects over arrays. All ranks share the cores of this machine: on hosts of their own the time of
objects would not grow with their number. Memory and bytes are the same anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from prefixes import WORKLOADS, make_rows

from trainer.train.distributed import World, join_world, leave_world
from trainer.train.microbatches import share_out
from trainer.train.prefixes import prefix_groups
from trainer.train.shares import FlatRows, Plan, deal
from trainer.types import Completion, Row, Turn

BUDGET = 32768
VOCABULARY = 152064


class Clock:
    """Seconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.parts[name] = time.perf_counter() - began


def fresh(source: list[Row]) -> list[Turn]:
    """Turns as an engine leaves them on rank 0: lists, no arrays yet."""
    return [Turn("update", r.prompt_ids, Completion(r.response_ids, r.behave_logprobs, "stop", 0)) for r in source]


def rows_of(turns: list[Turn]) -> list[Row]:
    rows = []
    for number, turn in enumerate(turns):
        done = turn.completion
        rows.append(Row(turn.prompt_ids, done.token_ids, done.logprobs, 1.0, 1e-6, number))
        rows[-1].array = turn.ids
    return rows


def planned(rows: list[Row], ranks: int) -> Plan:
    return share_out(prefix_groups(rows), [row.num_tokens for row in rows], ranks, BUDGET)


def arrays(world: World, turns: list[Turn], clock: Clock) -> tuple[Any, int]:
    """The micro-batches of this rank, and the bytes that it was sent."""
    rows, plan = [], []
    if world.is_main:
        with clock.part("rank0_arrays_s"):
            rows = rows_of(turns)
        with clock.part("rank0_plan_s"):
            plan = planned(rows, world.size)
    batches = deal(rows, plan, world)
    return batches, 0 if world.is_main else len(pickle.dumps(FlatRows.of(batches), pickle.HIGHEST_PROTOCOL))


def objects(world: World, turns: list[Turn], clock: Clock) -> tuple[Any, int]:
    with clock.part("received_s"):
        turns = world.broadcast(turns if world.is_main else None)
    rows = rows_of(turns)
    with clock.part("plan_s"):
        plan = planned(rows, world.size)
    mine = [[rows[i] for i in members] for members in plan[world.rank]]
    return (rows, mine), 0 if world.is_main else len(pickle.dumps(turns, pickle.HIGHEST_PROTOCOL))


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(world: World, way: Callable[..., tuple[Any, int]], source: list[Row]) -> dict[str, float]:
    turns = fresh(source)
    gc.collect()
    before = resident()
    world.barrier()
    clock, began = Clock(), time.perf_counter()
    kept, received = way(world, turns, clock)
    seconds = time.perf_counter() - began
    clock.parts["step_s"] = max(world.gather(seconds))
    held = resident() - before
    del kept
    return clock.parts | {"received_bytes": received, "resident_bytes": held}


def rank(number: int, size: int, folder: str, documents: int, rounds: int) -> None:
    torch.set_num_threads(1)
    world = join_world(number, size, f"file://{folder}/rendezvous")
    source = []
    if world.is_main:
        source = make_rows(WORKLOADS["memagent"], documents, "section_first", VOCABULARY)
        for row in source:
            row.behave_logprobs = [-0.001 * i for i in range(len(row.response_ids))]
    tokens = world.broadcast(sum(row.num_tokens for row in source))
    found: dict[str, dict[str, float]] = {}
    for way in (arrays, objects):
        # A first round's memory was never used before: what it holds is what a run would hold.
        every = [world.gather(measure(world, way, source)) for _ in range(rounds)]
        first, second = every[0][1], min(every, key=lambda each: each[0]["step_s"])
        timings = {name: round(value, 3) for part in (second[1], second[0]) for name, value in part.items()}
        timings = {name: value for name, value in timings.items() if name.endswith("_s")}
        found[way.__name__] = {
            **timings,
            "received_bytes_per_token": round(first["received_bytes"] / tokens, 2),
            "resident_bytes_per_token": round(first["resident_bytes"] / tokens, 2),
        }
    if world.is_main:
        for name, numbers in found.items():
            print(
                json.dumps({"way": name, "ranks": size, "tokens": tokens, "rows": len(source), **numbers}), flush=True
            )
        ratios = {
            name: round(found["objects"][name] / found["arrays"][name], 1)
            for name in ("step_s", "received_bytes_per_token", "resident_bytes_per_token")
        }
        print(json.dumps({"objects_over_arrays": ratios}), flush=True)
    leave_world(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=float, default=8e6, help="tokens of the step")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    document = make_rows(WORKLOADS["memagent"], 1, "section_first", VOCABULARY)
    documents = max(1, round(a.tokens / sum(row.num_tokens for row in document)))
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            rank, (a.ranks, folder, documents, a.rounds), nprocs=a.ranks, start_method="forkserver"
        )


if __name__ == "__main__":
    main()
