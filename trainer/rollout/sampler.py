"""Who samples for a run: the trainer's own process, or servers (`trainer.rollout.server_sampler`).

The loop asks for a step's groups, and says when new weights are to be sampled with. All methods are collective: every
rank calls them. Rank 0 gets whole groups, the others their `Group.scores`: whoever needs rows is sent them
(`trainer.train.shares`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from trainer.config import RunConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.rollout.buffer import Cursor
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.rollout.turn_advantages import has_signal
from trainer.schedule import Schedule
from trainer.tasks.base import TaskSource
from trainer.train.distributed import World
from trainer.train.logprobs import PolicyModel
from trainer.types import Group, Task
from trainer.weights.source import refresh

Asked = tuple[Sequence[Task], SamplingPlan]


class Sampler(ABC):
    """What the loops need of it."""

    def __init__(self, config: RunConfig, source: TaskSource, course: Schedule) -> None:
        self.config, self.source, self.course = config, source, course
        self.cursor = Cursor(0, (), course.has_task)
        self._dropped = 0
        self._score_wait: float | None = None
        """Seconds that the last batch waited for nothing but scores; None where no reward asks others."""

    def begin(self, next_task: int, taken: tuple[int, ...]) -> None:
        """Go on with these tasks: `next_task` and those above it that are not in `taken`."""
        self.cursor = Cursor(next_task, taken, self.course.has_task)

    @abstractmethod
    def groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """Roll out these tasks now, with the present weights; groups in their order.

        Raises:
            RolloutInterruptedError: the run is to stop.
        """

    def each(self, asked: Iterable[Asked]) -> Iterator[tuple[list[Group], float]]:
        """`groups` of several lists of tasks, in their order, with the seconds that they took.

        Raises:
            RolloutInterruptedError: the run is to stop.
        """
        began = time.perf_counter()
        for tasks, plan in asked:
            yield self.groups(tasks, plan), time.perf_counter() - began
            began = time.perf_counter()

    @abstractmethod
    def batch(self, number: int) -> list[Group]:
        """The groups that step `number` learns from. Raises RolloutInterruptedError when the run is to stop."""

    @abstractmethod
    def publish(self, version: int) -> dict[str, float]:
        """Sample with the learner's present weights from now on; seconds by part, for the step's timings."""

    def free_for_training(self) -> None:  # noqa: B027 (only a server on the trainer's GPU has something to give)
        """The step's groups are there and training begins: free what training can use."""

    def stats(self) -> dict[str, float]:
        """Numbers about sampling since the last call, for the step's record. `cached_share` leaves evaluations out; the
        speed is that of all requests.
        """
        dropped, self._dropped = self._dropped, 0
        numbers = {"refilled_groups": float(dropped)} if self.config.refills else {}
        return numbers | ({} if self._score_wait is None else {"judge_wait_s": self._score_wait})

    def close(self) -> None:  # noqa: B027 (most have nothing to give up)
        """Give up what is under way."""

    def plan(self, number: int) -> SamplingPlan:
        """How the tasks of step `number` are sampled."""
        c = self.config.rollout
        return SamplingPlan(f"train-{number}", c.group_size, c.temperature)


class EmbeddedSampler(Sampler):
    """Every rank samples its share of the tasks in its own process; sampling and training take turns.

    Args:
        engine, controller: of this rank. world: the ranks. replica, policy: the model that is sampled from, and the one
            in training (the same one where there is one rank).
    """

    def __init__(
        self,
        config: RunConfig,
        source: TaskSource,
        course: Schedule,
        engine: EmbeddedEngine,
        controller: RolloutController,
        world: World,
        replica: Any,
        policy: PolicyModel,
    ) -> None:
        super().__init__(config, source, course)
        self.engine, self.controller, self.world = engine, controller, world
        self.replica, self.policy = replica, policy
        self._reported = (0, 0)

    def _totals(self) -> tuple[int, int]:
        """Prompt tokens of this rank's engine until now, and those of them that it computed."""
        return self.engine.stats.prompt_tokens, self.engine.stats.prefilled_tokens

    def groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """See Sampler."""
        return shared_groups(self.controller, self.world, tasks, plan)

    def batch(self, number: int) -> list[Group]:
        """See Sampler; with dynamic sampling in rounds, until enough groups have something to learn from."""
        c, numbers, plan = self.config.rollout, self.cursor.numbers(), self.plan(number)
        self.controller.meter.take()  # of an evaluation before
        self._reported = self._totals()
        kept: list[Group] = []
        spare: list[Group] = []
        consumed: list[int] = []
        while len(kept) < c.batch_size:
            fresh = list(islice(numbers, c.batch_size - len(kept)))
            consumed += fresh
            found = self.groups([self.source.train(i) for i in fresh], plan)
            if not self.config.refills:
                kept = found
                break
            mine = found if self.world.is_main else []  # only rank 0 has the turns that may be rewarded apart
            useful = self.world.broadcast([has_signal(group, self.config.algorithm) for group in mine])
            for group, signal in zip(found, useful, strict=True):
                (kept if signal else spare).append(group)
            if len(consumed) >= c.max_refill * c.batch_size:
                break
        waited = self.controller.meter.take()
        self._score_wait = waited if self.controller.asks_others else None
        self._dropped = max(0, len(kept) + len(spare) - c.batch_size)
        kept = (kept + spare)[: c.batch_size]
        self.cursor.consume(consumed)
        return kept

    def stats(self) -> dict[str, float]:
        """See Sampler."""
        now, before = self._totals(), self._reported
        mine = [one - other for one, other in zip(now, before, strict=True)]
        prompts, computed = (sum(one) for one in zip(*self.world.gather(mine), strict=True))
        return super().stats() | ({"cached_share": 1 - computed / prompts} if prompts else {})

    def publish(self, version: int) -> dict[str, float]:
        """See Sampler."""
        refresh(self.replica, self.policy, self.world)
        self.engine.version = version
        return {}


def shared_groups(
    controller: RolloutController, world: World, tasks: Sequence[Task], plan: SamplingPlan
) -> list[Group]:
    """Roll out tasks on all ranks, the r-th taking every size-th from the r-th on; whole groups on rank 0."""
    size = world.size
    if not (shares := world.collect(controller.run(tasks[world.rank :: size], plan))):
        received: list[Group] = world.broadcast(None)
        return received
    groups = [shares[i % size][i // size] for i in range(len(tasks))]
    world.broadcast([group.scores() for group in groups] if size > 1 else None)
    return groups
