"""Sampling on servers: rank 0 talks to them in a thread of its own, so that they go on while the ranks learn.

How far they may go ahead is a matter of the work buffer (`trainer.rollout.buffer`): with `rollout.max_staleness` 0 a
step's groups are all that is under way, and training and sampling take turns.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from trainer.config import RunConfig
from trainer.engines.base import EngineGoneError
from trainer.engines.hang_watch import watch_for_hangs
from trainer.engines.served import ServedEngine
from trainer.engines.served_stats import EVALUATES, ServedStats
from trainer.errors import UserError
from trainer.judge.priority_limiter import ORDER
from trainer.placement import gpus_per_server
from trainer.rollout.background import BackgroundLoop
from trainer.rollout.buffer import Slot, WorkBuffer
from trainer.rollout.controller import RolloutController, RolloutInterruptedError, SamplingPlan
from trainer.rollout.roofline import DecodeRoofline
from trainer.rollout.sampler import Asked, Sampler
from trainer.rollout.turn_advantages import has_signal
from trainer.rollout.workers import Workers
from trainer.schedule import Schedule
from trainer.serving.fleet import Fleet
from trainer.tasks.base import TaskSource
from trainer.train.distributed import World
from trainer.types import Group, Task
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.publisher import Publisher

log = logging.getLogger("trainer")
T = TypeVar("T")

TICK_SECONDS = 2.0
"""How often rank 0 tells the others that it still waits, and looks whether the run is to stop."""
NAMED = 8
"""Trajectories that a stall names."""


@dataclass(frozen=True, slots=True)
class Served:
    """What rank 0 has for sampling on servers."""

    engine: ServedEngine
    fleet: Fleet
    controller: RolloutController
    loop: BackgroundLoop
    workers: Workers | None = None
    """Controllers in processes of their own, which then make the groups that are trained on."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What rank 0 tells the other ranks."""

    what: Literal["wait", "done", "stop", "failed"]
    value: Any = None


class ServedSampler(Sampler):
    """One for every rank.

    Args:
        served: on rank 0 only. publisher: makes what brings the learner's weights to the servers, once these are
            there (None where nothing is trained); collective. world: the ranks. stop: whether the run is to stop,
            asked on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        source: TaskSource,
        course: Schedule,
        world: World,
        stop: Callable[[], bool],
        served: Served | None,
        publisher: Callable[[], Publisher | None],
    ) -> None:
        super().__init__(config, source, course)
        self.world, self.stop, self.served, self._make_publisher = world, stop, served, publisher
        self._publisher: Publisher | None = None
        self._buffer: WorkBuffer | None = None
        self._started = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._ids: dict[Slot, str] = {}
        self._prepared: dict[int, asyncio.Task[tuple[Task, Any]]] = {}
        self._staleness: list[int] = []
        self._reported = ServedStats()

    def begin(self, next_task: int, taken: tuple[int, ...]) -> None:
        """See Sampler."""
        super().begin(next_task, taken)
        self._buffer = None
        self._prepared = {}

    def groups(self, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """See Sampler; what is under way for training goes on beside it."""
        self._start()
        return self._together(lambda served: self._groups(served, tasks, plan), _scores)

    def each(self, asked: Iterable[Asked]) -> Iterator[tuple[list[Group], float]]:
        """See Sampler; all begin at once, since the last turns of long documents leave servers idle.

        Seconds are those since the groups before were there.
        """
        self._start()
        began = time.perf_counter()
        # Where nothing is sampled, their number is all that is wanted; both ways a list that cannot be is refused.
        lists = [one if self.served is not None else None for one in asked]
        jobs: list[asyncio.Task[list[Group]] | None] = []

        async def wait_for(served: Served, number: int) -> list[Group]:
            while lists and (one := lists.pop(0)):
                jobs.append(asyncio.ensure_future(self._groups(served, *one)))
                await asyncio.sleep(0)  # the memory's lines are prepared now; first requests go out, or the run stops
            job = jobs[number]
            assert job is not None
            groups = await job
            jobs[number] = None  # whoever asked lets its turns go
            if self._failure is not None:  # of the watch of the servers: no lost one would come back
                raise self._failure
            return groups

        try:
            for number in range(len(lists)):
                groups = self._together(partial(wait_for, number=number), _scores)
                yield groups, time.perf_counter() - began
                began = time.perf_counter()
        finally:
            self._give_up([job for job in jobs if job is not None])

    def batch(self, number: int) -> list[Group]:  # noqa: ARG002 (the buffer knows what comes next)
        """See Sampler."""
        self._start()
        groups, consumed = self._together(self._next, lambda found: (_scores(found[0]), found[1]))
        self.cursor.consume(consumed)
        return groups

    def publish(self, version: int) -> dict[str, float]:
        """See Sampler."""
        self._start()
        wanting = self.served is not None and self.served.fleet.wants_folder
        assert self._publisher is not None
        try:
            done = self._publisher.publish(version, folder=wanting)
        except EngineGoneError as error:
            raise (self.served.loop.run(self.served.fleet.lost()) if self.served is not None else error) from error
        if self.served is not None and self._buffer is not None:
            self.served.loop.run(self._go_on(self.served))
        return {
            "prepare": done.prepare_seconds,
            "pause": done.pause_seconds,
            "transfer": done.transfer_seconds,
            "resume": done.resume_seconds,
            "interruption": done.interruption_seconds,
        }

    def free_for_training(self) -> None:
        """See Sampler; only servers that were started for it have memory to give."""
        if self.served is not None:
            gc.collect(
                1
            )  # the collector looks seldom (`collect_seldom`), and a cycle of the last step may hold GPU memory
        if isinstance(self._publisher, ColocatedPublisher) and self._publisher.trades:
            self._together(_all_back)  # one that died in the rollouts may be starting in the memory that is wanted
            self._publisher.release()

    def stats(self) -> dict[str, float]:
        """See Sampler."""
        ages, self._staleness = self._staleness, []
        numbers = super().stats()
        if ages:
            numbers |= {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
        if self.served is not None:
            now, before = replace(self.served.engine.stats), self._reported
            if self.served.workers is not None:
                now = self.served.workers.stats(now)
            self._reported = now
            share = now.cached_share_since(before)
            numbers |= {} if share is None else {"cached_share": share}
            numbers |= self._decoding(self.served, now, before)
        return numbers

    def _decoding(self, served: Served, now: ServedStats, before: ServedStats) -> dict[str, float]:
        """Speed of sampling while there were requests, and its share of what the GPUs' memory allows (where known)."""
        seconds, tokens = now.busy_seconds - before.busy_seconds, now.sampled_tokens - before.sampled_tokens
        if seconds <= 0 or not tokens:
            return {}
        numbers = {"rollout_tokens_per_s": tokens / seconds}
        servers = max(1, served.fleet.usable())
        gpu = torch.cuda.get_device_name(self.world.device) if self.world.device.type == "cuda" else ""
        roofline = DecodeRoofline.of(served.engine.model, gpu, servers * gpus_per_server(self.config), servers)
        if roofline is not None:
            context = now.context_tokens - before.context_tokens
            requests = now.request_seconds - before.request_seconds
            numbers["decode_roofline"] = roofline.share(tokens, context, requests, seconds)
        return numbers

    def close(self) -> None:
        """See Sampler."""
        if self._publisher is not None:
            self._publisher.close()
        if self.served is not None:
            if self.served.workers is not None:
                self.served.workers.close()
            self.served.loop.close()
            asyncio.run(self.served.engine.pool.close())  # the connections of the loop that has just ended

    # -- on rank 0 --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Wait for the servers, the first time."""
        if not self._started:
            self._started = True
            self._together(self._ready)
            self._publisher = self._make_publisher()

    async def _ready(self, served: Served) -> None:
        await served.fleet.ready()
        self._keep(served.fleet.watch())
        self._keep(watch_for_hangs(served.engine, self.config.serving.hang_seconds))
        if served.workers is not None:
            served.workers.go_on()
            self._keep(served.workers.follow())

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        job = asyncio.get_running_loop().create_task(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._ended)

    def _ended(self, job: asyncio.Task[None]) -> None:
        """What ends a job, such as the watch of the servers, ends the run: no server would come back without it."""
        self._jobs.discard(job)
        if not job.cancelled() and isinstance(error := job.exception(), Exception):
            log.error("what the sampler does beside its work has ended", exc_info=error)
            self._failure = self._failure or error
            self._changed.set()

    async def _groups(self, served: Served, tasks: Sequence[Task], plan: SamplingPlan) -> list[Group]:
        """What `groups` and `each` ask for: tasks of an evaluation."""
        if self._failure is not None:
            raise self._failure
        EVALUATES.set(True)
        return await served.controller.groups(tasks, plan)

    def _give_up(self, jobs: Sequence[asyncio.Task[Any]]) -> None:
        """Cancel them, and look at what became of all, so that asyncio tells no more of it."""
        if self.served is not None and not all(job.done() for job in jobs):
            self.served.loop.run(_cancelled(jobs))
        for job in jobs:
            if not job.cancelled():
                job.exception()

    async def _next(self, served: Served) -> tuple[list[Group], list[int]]:
        """The next step's groups, and the numbers of the tasks that are done with."""
        if self._buffer is None:
            c = self.config.rollout
            self._buffer = WorkBuffer(c.batch_size, c.max_staleness, c.window, self.cursor.numbers(), first_alone=True)
        buffer, waited = self._buffer, 0.0
        self._admit(served)
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            slots = buffer.take(served.engine.version)
            if slots is not None:
                break
            began, scores_alone = time.monotonic(), buffer.lacks_only_scores(served.engine.version)
            try:
                await asyncio.wait_for(self._changed.wait(), self.config.rollout.stall_seconds)
            except TimeoutError:
                self._tell_stall(buffer)
            waited += (time.monotonic() - began) * scores_alone
        self._make_ready(served, buffer)
        self._score_wait = waited if served.controller.asks_others else None
        groups = [slot.group for slot in slots if slot.group is not None]
        served.controller.check(groups)
        self._staleness = [served.engine.version - oldest for group in groups for oldest in _versions(group)]
        consumed = [slot.number for slot in slots] + buffer.dropped
        self._dropped = len(buffer.dropped)
        buffer.dropped = []
        return groups, consumed

    async def _go_on(self, served: Served) -> None:
        if self._buffer is not None:
            self._buffer.trained()
            self._admit(served)

    def _admit(self, served: Served) -> None:
        assert self._buffer is not None
        for slot in self._buffer.admit(served.engine.version):
            self._keep(self._work(served, self._buffer, slot))

    def _make_ready(self, served: Served, buffer: WorkBuffer) -> None:
        """While the ranks learn, make a step's next tasks ready: a tenth of a second for a document of 30,000 tokens,
        in which its server would have nothing to do.
        """
        if served.workers is not None:
            served.workers.make_ready(buffer.upcoming(self.config.rollout.batch_size))
            return
        for number in buffer.upcoming(self.config.rollout.batch_size):
            if number not in self._prepared:
                job = asyncio.get_running_loop().create_task(self._task(served, number))
                job.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised where it is wanted
                self._prepared[number] = job

    async def _task(self, served: Served, number: int) -> tuple[Task, Any]:
        """A task by its number, and what the agent prepares of it; made in another thread, so that others go on."""
        task = await asyncio.to_thread(self.source.train, number)
        return task, await asyncio.to_thread(served.controller.agent.prepare, task)

    async def _work(self, served: Served, buffer: WorkBuffer, slot: Slot) -> None:
        """Sample one group to its end."""
        ORDER.set(slot.order)
        try:
            group = await self._group(served, slot)
            await asyncio.to_thread(_make_arrays, group)  # while others sample, not when the step waits for it
        except Exception as error:
            self._failure = error
        else:
            c = self.config.rollout
            again = self.config.refills and len(buffer.dropped) < (c.max_refill - 1) * c.batch_size
            if again and not has_signal(group, self.config.algorithm):
                buffer.drop(slot)
                self._admit(served)
            else:
                slot.group = group
        finally:
            self._ids.pop(slot, None)
            self._changed.set()

    async def _group(self, served: Served, slot: Slot) -> Group:
        plan = self.plan(self.course.step_of(slot.number))
        if served.workers is not None:
            return await served.workers.group(slot.number, slot.order, plan, lambda: self._generated(served, slot))
        ready = self._prepared.pop(slot.number, None)
        task, prepared = await (self._task(served, slot.number) if ready is None else ready)
        self._ids[slot] = task.id
        return await served.controller.group(task, prepared, plan, lambda: self._generated(served, slot))

    def _generated(self, served: Served, slot: Slot) -> None:
        slot.generated = True
        self._admit(served)
        self._changed.set()

    def _tell_stall(self, buffer: WorkBuffer) -> None:
        names = [f"{self._ids.get(slot, slot.number)} (version {slot.version})" for slot in buffer.running]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        log.warning(
            "no group was finished for %.0f s; waited for: %s%s",
            self.config.rollout.stall_seconds,
            ", ".join(names[:NAMED]) or "none",
            more,
        )

    # -- rank 0 and the others --------------------------------------------------------------------------------------

    def _together(self, make: Callable[[Served], Coroutine[Any, Any, T]], told: Callable[[T], T] = lambda v: v) -> T:
        """What a coroutine on rank 0 returns, on the other ranks what `told` makes of it.

        They are told every while that they are to wait.
        """
        if self.served is None:
            return self._listen()
        began = time.monotonic()
        try:
            value = self.served.loop.watch(_explained(self.served, make), self._tick, TICK_SECONDS)
        except RolloutInterruptedError:
            self.world.broadcast(_Said("stop"))
            raise
        except Exception as error:
            reason = error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
            self.world.broadcast(_Said("failed", reason))
            raise
        log.debug("rank 0 waited for %.1f s", time.monotonic() - began)
        if self.world.size > 1:
            self.world.broadcast(_Said("done", told(value)))
        return value

    def _listen(self) -> Any:
        while True:
            said: _Said = self.world.broadcast(None)
            if said.what == "done":
                return said.value
            if said.what == "stop":
                raise RolloutInterruptedError
            if said.what == "failed":
                raise said.value
            if said.value and self._publisher is not None:
                self._publisher.offer()

    def _tick(self) -> None:
        if self.stop():
            raise RolloutInterruptedError
        # A server that came back may be the one that is waited for: it joins once the present weights are in a folder.
        wanting = self.served is not None and self._publisher is not None and self.served.fleet.wants_folder
        self.world.broadcast(_Said("wait", wanting))
        if wanting and self._publisher is not None:
            self._publisher.offer()


async def _cancelled(jobs: Sequence[asyncio.Task[Any]]) -> None:
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)


async def _all_back(served: Served) -> None:
    """Wait for servers that were lost and are started again."""
    if served.fleet.usable() < served.fleet.config.num_servers:
        await served.fleet.ready()


async def _explained(served: Served, make: Callable[[Served], Coroutine[Any, Any, T]]) -> T:
    """What the coroutine returns; where no server is left, an error with what became of each."""
    try:
        return await make(served)
    except EngineGoneError as error:
        raise await served.fleet.lost() from error


def _make_arrays(group: Group) -> None:
    for trajectory in group.trajectories:
        for turn in trajectory.turns:
            turn.ids  # noqa: B018 (made once, on first use)


def _scores(groups: list[Group]) -> list[Group]:
    return [group.scores() for group in groups]


def _versions(group: Group) -> list[int]:
    """The oldest weight version within each trajectory."""
    return [min(turn.completion.version for turn in t.turns) for t in group.trajectories if t.turns]
