"""Rank 0 of a run on stand-in servers, for benchmarks/fleet.py: everything of it is the trainer's but the learning.

    python benchmarks/fleet_rank.py WORK --steps N --learn SECONDS

Reads WORK/config.yaml, and WORK/state.json where an earlier one was killed. Sampler, controller, work buffer, reward,
engine and the folder publisher are those of a real run, and a step makes its training rows; in place of an optimizer
step it sleeps. What is published are the weights of the small model in WORK/model: servers say how long a large one
would take. Prints a JSON object a line: `start`, `begun` of every step, `step`, and `lost` servers when they are.
"""

from __future__ import annotations

import argparse
import contextvars
import json
import logging
import os
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.agents import make_agent
from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.engines.dialect import Stretch
from trainer.engines.sglang_dialect import SGLangDialect
from trainer.files import write_atomic
from trainer.rewards.make import make_reward
from trainer.rollout.batch import make_batch
from trainer.rollout.samplers import SamplerParts
from trainer.rollout.server_sampling import served_sampler
from trainer.schedule import Schedule
from trainer.tasks import leave_out_misfits, make_source
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.train.loading import Origin
from trainer.train.model import load_tokenizer, stop_token_ids
from trainer.types import Group, Task

_servers: contextvars.ContextVar[list[float]] = contextvars.ContextVar("servers' seconds")


def show(**values: Any) -> None:
    print(json.dumps({"at": time.time(), **values}), flush=True)


@dataclass
class Own:
    """The servers' own time of a group: of its slowest trajectory, the seconds that its requests took on servers by
    their clock, one after the other, and the prefixes that it waited for. late: by which the stand-ins answered late.
    """

    seconds: float = 0.0
    late: float = 0.0
    lasted: float = 0.0


class TimedDialect(SGLangDialect):
    """Adds up what servers say that answers took."""

    def read(self, answer: dict[str, Any], name: str) -> Stretch:
        own = _servers.get(None)
        if own is not None:
            own[0] += answer["meta_info"]["e2e_latency"]
            own[1] += answer["meta_info"]["late"]
        return super().read(answer, name)


@dataclass
class Meter:
    """Measures the groups of a step around the real controller and engine."""

    groups: dict[str, Own] = field(default_factory=dict)
    _running: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    _read: dict[str, float] = field(default_factory=dict)

    def attach(self, served: Any) -> None:
        """Wrap what makes groups, trajectories and prefixes."""
        served.engine.dialect = TimedDialect()
        controller, sharing = served.controller, served.engine.sharing
        make_group, make_one = controller.group, controller._trajectory
        ready, read = sharing.ready, sharing._read_ids

        async def group(task: Task, *rest: Any) -> Group:
            began = time.perf_counter()
            made: Group = await make_group(task, *rest)
            slowest = max(self._running.pop(task.id), key=lambda own: own[0], default=[0.0, 0.0])
            self.groups[task.id] = Own(slowest[0], slowest[1], time.perf_counter() - began)
            return made

        async def trajectory(task: Task, *rest: Any) -> Any:
            own = [0.0, 0.0]
            _servers.set(own)
            self._running[task.id].append(own)
            return await make_one(task, *rest)

        async def timed_read(ids: list[int], key: str) -> Any:
            own = [0.0, 0.0]
            _servers.set(own)  # of the task that reads: it is nobody's own
            place = await read(ids, key)
            self._read[key] = own[0]
            return place

        async def timed_ready(prompt: Any, key: str) -> Any:
            began, waits = time.perf_counter(), sharing.waits
            sent = await ready(prompt, key)
            if sharing.waits > waits and (own := _servers.get(None)) is not None:
                own[0] += min(time.perf_counter() - began, self._read.get(key, 0.0))
            return sent

        controller.group, controller._trajectory = group, trajectory
        sharing.ready, sharing._read_ids = timed_ready, timed_read


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
        self.meter = Meter()
        assert self.sampler.served is not None
        self.served = self.sampler.served
        self.meter.attach(self.served)

    def run(self, steps: int) -> None:
        """Train, or go on, to step number `steps`."""
        file = self.work / "state.json"
        state = json.loads(file.read_text()) if file.exists() else {"step": 0, "next_task": 0, "taken": []}
        began = time.perf_counter()
        self.sampler.begin(state["next_task"], tuple(state["taken"]))
        parts = self.sampler.publish(state["step"])  # also in the beginning of a run: what forms groups of servers
        show(
            event="start", pid=os.getpid(), after_step=state["step"], servers=len(self.served.engine.pool.usable()),
            seconds=time.perf_counter() - began, publish_s=parts["interruption"],
        )  # fmt: skip
        for number in range(state["step"] + 1, steps + 1):
            self._step(number)
            cursor = self.sampler.cursor
            write_atomic(file, json.dumps({"step": number, "next_task": cursor.next_task, "taken": cursor.taken}))
        self.sampler.close()

    def _step(self, number: int) -> None:
        show(event="begun", step=number)
        usable, stats = set(self.served.engine.pool.usable()), self.served.engine.stats
        before = (stats.requests, stats.ahead_requests, self.served.engine.pool.redispatched)
        cpu, began = self._cpu(), time.perf_counter()
        groups = self.sampler.batch(number)
        waited = time.perf_counter() - began
        spent = [now - then for now, then in zip(self._cpu(), cpu, strict=True)]
        asked, ahead, again = (
            now - then
            for now, then in zip(
                (stats.requests, stats.ahead_requests, self.served.engine.pool.redispatched), before, strict=True
            )
        )
        made = time.perf_counter()
        batch = make_batch(groups, self.config, number)
        rows = time.perf_counter() - made
        self.sampler.free_for_training()
        time.sleep(self.learn)
        published = time.perf_counter()
        parts = self.sampler.publish(number)
        published = time.perf_counter() - published
        measured = [self.meter.groups.pop(group.task.id) for group in groups]
        slowest = max(measured, key=lambda own: own.seconds)
        trajectories = [t for group in groups for t in group.trajectories]
        show(
            event="step", step=number, wait_s=waited, servers_own_s=slowest.seconds, stand_ins_late_s=slowest.late,
            group_beyond_share=1 - sum(own.seconds for own in measured) / sum(own.lasted for own in measured),
            requests=asked, read_ahead=ahead, sent_again=again, requests_per_s=(asked + ahead) / waited,
            cpu_of_process=spent[0] / waited, cpu_of_controller=spent[1] / waited,
            cpu_ms_per_request=1000 * spent[1] / max(1, asked + ahead), rows_s=rows,
            tokens=batch.stats["n_tokens"], sampled_tokens=batch.stats["sampled_tokens"],
            failed=sum(t.error is not None for t in trajectories), publish_s=published,
            lost=len(usable - set(self.served.engine.pool.usable())),
            servers=len(self.served.engine.pool.usable()),
            memory_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            **{f"publish_{name}_s": value for name, value in parts.items()},
        )  # fmt: skip

    def _cpu(self) -> tuple[float, float]:
        """CPU seconds of this process and of the thread that talks to the servers."""
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
