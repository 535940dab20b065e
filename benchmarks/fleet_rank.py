"""Rank 0 of a run on stand-in servers, for benchmarks/fleet.py: everything of it is the trainer's but the learning.

    python benchmarks/fleet_rank.py WORK --steps N --learn SECONDS

Reads WORK/config.yaml, and WORK/state.json where an earlier one was killed. Sampler, controller, work buffer, reward,
engine and the folder publisher are those of a real run, and a step makes its training rows; in place of an optimizer
step it sleeps. What is published are the weights of the small model in WORK/model: servers say how long a large one
would take. Prints a JSON object a line: `start`, `begun` of every step, `step`, and `lost` servers when they are.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from fleet_machine import Rates, replayed

from trainer.agents import make_agent
from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.engines.served_stats import ServedStats
from trainer.files import write_atomic
from trainer.rewards.make import make_reward
from trainer.rollout.batch import make_batch
from trainer.rollout.samplers import SamplerParts, served_sampler
from trainer.schedule import Schedule
from trainer.tasks import leave_out_misfits, make_source
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.train.loading import Origin
from trainer.train.model import load_tokenizer, stop_token_ids
from trainer.types import Group


def show(**values: Any) -> None:
    print(json.dumps({"at": time.time(), **values}), flush=True)


class Rank:
    """Rank 0. learn: seconds of an optimizer step."""

    def __init__(self, work: Path, learn: float) -> None:
        self.work, self.learn = work, learn
        self.config: RunConfig = read_config(work / "config.yaml", RunConfig)
        model, world = work / "model", single_world()
        self.tokenizer = load_tokenizer(model)
        # The small model learns on a CPU: what the preset says of a large one on GPUs is not for it.
        small = self.config.model.model_copy(update={"dtype": "float32", "gradient_checkpointing": "none"})
        config = self.config.model_copy(update={"model": small})
        origin = Origin(model, config, world)
        source, agent = make_source(self.config), make_agent(self.config, self.tokenizer)
        leave_out_misfits(source, agent)
        course = Schedule.of(self.config, source.train_size)
        learner = Learner(origin.lm, config, world, course.total_steps, origin.weights)
        parts = SamplerParts(
            self.config, world, source, course, agent, make_reward(self.config, self.tokenizer),
            stop_token_ids(origin.lm, self.tokenizer), lambda: False, window=0,
        )  # fmt: skip
        self.sampler = served_sampler(parts, model, learner, self.tokenizer, lambda: False)
        assert self.sampler.served is not None
        self.served = self.sampler.served
        values = json.loads((work / "rates.json").read_text(encoding="utf-8"))
        values.pop("most")
        self.rates = Rates(**values)

    def run(self, steps: int) -> None:
        """Train, or go on, to step number `steps`."""
        file = self.work / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {"step": 0, "next_task": 0, "taken": []}
        began = time.perf_counter()
        self.sampler.begin(state["next_task"], tuple(state["taken"]))
        pids = self.served.workers.pids() if self.served.workers else []
        parts = self.sampler.publish(state["step"])  # also in the beginning of a run: what forms groups of servers
        show(
            event="start", controllers=pids, after_step=state["step"], servers=len(self.served.engine.pool.usable()),
            seconds=time.perf_counter() - began, publish_s=parts["interruption"],
        )  # fmt: skip
        for number in range(state["step"] + 1, steps + 1):
            self._step(number)
            cursor = self.sampler.cursor
            write_atomic(file, json.dumps({"step": number, "next_task": cursor.next_task, "taken": cursor.taken}))
        self.sampler.close()

    def _step(self, number: int) -> None:
        show(event="begun", step=number)
        pool = self.served.engine.pool
        usable, before, again = set(pool.usable()), self._stats(), pool.redispatched
        cpu, began = self._cpu(), time.perf_counter()
        groups = self.sampler.batch(number)
        waited = time.perf_counter() - began
        of_process, of_controllers = (now - then for now, then in zip(self._cpu(), cpu, strict=True))
        now = self._stats()
        requests = now.requests + now.ahead_requests - before.requests - before.ahead_requests
        cached = (now.served_tokens - before.served_tokens) / (now.prompt_tokens - before.prompt_tokens)
        own = self._servers_own(groups, len(usable), cached)
        made = time.perf_counter()
        batch = make_batch(groups, self.config, number)
        rows = time.perf_counter() - made
        self.sampler.free_for_training()
        time.sleep(self.learn)
        published = time.perf_counter()
        parts = self.sampler.publish(number)
        published = time.perf_counter() - published
        show(
            event="step", step=number, wait_s=waited, servers_own_s=own, requests=now.requests - before.requests,
            read_ahead=now.ahead_requests - before.ahead_requests, sent_again=pool.redispatched - again,
            requests_per_s=requests / waited, cpu_of_rank_0=of_process / waited,
            cpu_of_controllers=of_controllers / waited, cpu_ms_per_request=1000 * of_controllers / requests,
            cached_share=cached, rows_s=rows, tokens=batch.stats["n_tokens"],
            sampled_tokens=batch.stats["sampled_tokens"], publish_s=published,
            failed=sum(t.error is not None for group in groups for t in group.trajectories),
            lost=len(usable - set(pool.usable())), servers=len(pool.usable()),
            memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **{f"publish_{name}_s": value for name, value in parts.items()},
        )  # fmt: skip

    def _servers_own(self, groups: list[Group], servers: int, cached: float) -> float:
        """What the servers would have taken with a client that takes no time, groups being dealt out evenly."""
        turns = [
            [
                [
                    (len(t.prompt_ids), round(len(t.prompt_ids) * (1 - cached)), len(t.completion.token_ids))
                    for t in one.turns
                ]
                for one in group.trajectories
            ]
            for group in groups
        ]
        return replayed(self.rates, [list(chain.from_iterable(turns[place::servers])) for place in range(servers)])

    def _stats(self) -> ServedStats:
        own = replace(self.served.engine.stats)
        return own if self.served.workers is None else self.served.workers.stats(own)

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of this process, and of what talks to the servers: its thread, or processes of their own."""
        if self.served.workers is not None:
            times = [psutil.Process(pid).cpu_times() for pid in self.served.workers.pids()]
            return time.process_time(), sum(one.user + one.system for one in times)
        thread = self.served.loop._thread.ident
        assert thread is not None
        return time.process_time(), time.clock_gettime(time.pthread_getcpuclockid(thread))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learn", type=float, default=1.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    Rank(given.work, given.learn).run(given.steps)


if __name__ == "__main__":
    main()
