"""Controllers in processes of their own: each asks a part of the servers, and rank 0 gets whole groups.

One process makes, sends and reads some hundred requests a second; a fleet of small models answers more. With
`rollout.controllers` rank 0 keeps the work buffer, the versions of the weights and the list of servers, and hands out
tasks by number. A controller process has the same agent, reward and engine as rank 0 would, for every so manieth
server, and sends back a group with its token ids as arrays. When one dies its tasks are taken up by the others, and it
is started again. What it does is in `trainer.rollout.worker`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.engines.http import Server
from trainer.engines.served import ServedEngine, ServedStats
from trainer.errors import RunError, UserError
from trainer.rollout.controller import SamplingPlan
from trainer.rollout.worker import WorkerJob, work
from trainer.types import Group

log = logging.getLogger("trainer")

FOLLOW_SECONDS = 1.0
HOLD_SECONDS, IDLE_SECONDS = 600.0, 60.0
"""How long a controller may take to hear of an update, which a reward that computes may delay, and to come to rest."""
STARTS = 3
"""How often a controller is started before the run ends: one that always dies has a fault of its own."""
SUMMED = tuple(
    one.name
    for one in fields(ServedStats)
    if one.name not in ("busy_seconds", "pause_seconds", "transfer_seconds", "resume_seconds")
)
"""Running totals that are those of all controllers together."""


@dataclass(eq=False)
class _Order:
    """A group that a controller is to make. order: of its admission, see `trainer.judge.priority_limiter`."""

    number: int
    order: int
    plan: SamplingPlan
    generated: Callable[[], None]
    done: asyncio.Future[Group]


@dataclass(eq=False)
class _Worker:
    """A controller's process.

    orders: what it is at, by number. up: it can begin. held: it sends no requests. idle: nor is any under way. ready:
    tasks that it has made ready. stats: its engine's running totals. starts: of its place. servers: of its own.
    """

    place: int
    process: Any
    pipe: Connection
    orders: dict[int, _Order] = field(default_factory=dict)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    up: bool = False
    ready: set[int] = field(default_factory=set)
    stats: ServedStats = field(default_factory=ServedStats)
    starts: int = 1
    servers: int = 1

    def send(self, *message: Any) -> None:
        try:
            self.pipe.send_bytes(pickle.dumps(message))
        except OSError:  # it has died, which its reader notices
            self.rest()

    def rest(self) -> None:
        """Nothing is to be waited for."""
        self.held.set()
        self.idle.set()


class Workers:
    """The controller processes of a run. Made anywhere; all else on the engine's event loop.

    Args:
        config, model: of the run. stop_ids, window: as of the controller in rank 0. engine: rank 0's.
    """

    def __init__(self, config: RunConfig, model: Path, stop_ids: set[int], window: int, engine: ServedEngine) -> None:
        self._job = WorkerJob(config, model, sorted(stop_ids), window)
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[Server, int] = {}
        self._told: list[tuple[Any, ...]] = []
        self._gone = ServedStats()  # of processes that have ended
        self._closing, self._holds = False, 0
        self._failure: UserError | None = None
        self._workers = [self._start(place) for place in range(config.rollout.controllers)]

    # -- groups -----------------------------------------------------------------------------------------------------

    async def group(self, number: int, order: int, plan: SamplingPlan, generated: Callable[[], None]) -> Group:
        """Have the group of a task sampled and scored; see `RolloutController.group`."""
        loop = self._listen()
        made = _Order(number, order, plan, generated, loop.create_future())
        self._hand_out(made)
        return await made.done

    def make_ready(self, numbers: Sequence[int]) -> None:
        """Have the tasks of these numbers made ready, which will be wanted next."""
        self._listen()
        known = set[int]().union(*(worker.ready for worker in self._workers))
        fresh = [number for number in numbers if number not in known]
        for place, worker in enumerate(self._workers):
            own = fresh[place :: len(self._workers)]
            worker.ready.update(own)
            worker.send("ready", own)

    def _hand_out(self, order: _Order) -> None:
        if self._failure is not None:
            order.done.set_exception(self._failure)
            return
        worker = min(
            self._workers, key=lambda one: (not one.up, len(one.orders) / one.servers, order.number not in one.ready)
        )
        for other in self._workers:
            if order.number in other.ready:
                other.ready.remove(order.number)
                if other is not worker:
                    other.send("forget", order.number)
        worker.orders[order.number] = order
        worker.send("task", order.number, order.order, order.plan)

    # -- servers and versions ---------------------------------------------------------------------------------------

    def tell_servers(self) -> None:
        """Tell the controllers which servers there are, where that has changed."""
        self._listen()
        usable = sorted(self._engine.pool.usable(), key=lambda server: server.name)
        told = [(one.name, one.url, one.version, self._generation(one)) for one in usable]
        if told != self._told:
            self._told = told
            for worker in self._workers:
                self._tell(worker)

    async def follow(self) -> None:
        """Tell the controllers of servers that come and go, until cancelled."""
        while True:
            self.tell_servers()
            await asyncio.sleep(FOLLOW_SECONDS)

    async def hold(self) -> None:
        """See `Others`."""
        self._listen()
        self._holds += 1
        for worker in self._workers:
            worker.held.clear()
            worker.idle.clear()
            if worker.up:
                worker.send("hold", self._holds)
            else:  # it sends nothing until it is told to go
                worker.rest()
        await _wait([(worker, worker.held) for worker in self._workers], HOLD_SECONDS)

    async def idle(self) -> None:
        """See `Others`."""
        await _wait([(worker, worker.idle) for worker in self._workers], IDLE_SECONDS)

    def go_on(self) -> None:
        """See `Others`."""
        self.tell_servers()
        for worker in self._workers:
            if worker.up:
                worker.send("go", self._engine.version)

    def _tell(self, worker: _Worker) -> None:
        count = len(self._workers)
        own = [one for place, one in enumerate(self._told) if _number(one[0], place) % count == worker.place]
        worker.servers = max(1, len(own))
        worker.send("servers", own or self._told)

    def _generation(self, server: Server) -> int:
        return self._generations.setdefault(server, len(self._generations))

    # -- numbers ----------------------------------------------------------------------------------------------------

    def stats(self, own: ServedStats) -> ServedStats:
        """Running totals of rank 0's engine and of all controllers'."""
        every = [own, self._gone, *(worker.stats for worker in self._workers)]
        totals = ServedStats(**{name: sum(getattr(one, name) for one in every) for name in SUMMED})
        # At the same time, not one after the other.
        totals.busy_seconds = own.busy_seconds + max(one.busy_seconds for one in every[1:])
        for name in ("pause_seconds", "transfer_seconds", "resume_seconds"):
            setattr(totals, name, getattr(own, name))
        return totals

    def pids(self) -> list[int]:
        """Process ids of the controllers."""
        return [worker.process.pid for worker in self._workers]

    # -- processes --------------------------------------------------------------------------------------------------

    def _start(self, place: int, starts: int = 1) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(self._job, there), name=f"controller-{place}", daemon=True)
        process.start()
        there.close()
        return _Worker(place, process, here, starts=starts)

    def _listen(self) -> asyncio.AbstractEventLoop:
        """Read what the controllers say, on this loop, from the first call on."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            for worker in self._workers:
                self._read(worker)
        return loop

    def _read(self, worker: _Worker) -> None:
        threading.Thread(target=self._receive, args=(worker,), name=worker.process.name, daemon=True).start()

    def _receive(self, worker: _Worker) -> None:
        assert self._loop is not None
        try:
            while True:
                message = pickle.loads(worker.pipe.recv_bytes())  # not on the loop: a group is megabytes
                self._loop.call_soon_threadsafe(self._hear, worker, *message)
        except (OSError, EOFError):
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._lost, worker)
        except Exception as error:  # of a class of the user's own, say
            text = f"{worker.process.name}: what it sent cannot be read ({type(error).__name__}: {error})"
            unreadable = UserError(f"{text}: agents, tasks and rewards must be picklable; or set rollout.controllers=0")
            self._loop.call_soon_threadsafe(self._fail, unreadable)

    def _hear(self, worker: _Worker, what: str, *rest: Any) -> None:
        if what == "up":
            worker.up = True
            if not self._engine.updating:  # else it goes on with the others
                worker.send("go", self._engine.version)
        elif what in ("held", "idle"):
            if rest[0] == self._holds:  # and not of an update that did not wait for it
                (worker.held if what == "held" else worker.idle).set()
        elif what == "lost":
            name, generation, problem = rest
            for server, known in self._generations.items():
                if (server.name, known) == (name, generation):
                    server.discard(problem)
        elif order := worker.orders.get(rest[0]):
            if what == "generated":
                order.generated()
                return
            del worker.orders[order.number]
            worker.stats = rest[2]
            if not order.done.done():
                order.done.set_exception(rest[1]) if what == "failed" else order.done.set_result(rest[1])

    def _lost(self, worker: _Worker) -> None:
        """Start a controller again that has died, and hand its tasks out anew."""
        worker.rest()
        if self._closing:
            return
        worker.process.join(1.0)
        code, orders = worker.process.exitcode, list(worker.orders.values())
        if worker.starts >= STARTS:
            self._fail(
                RunError(f"{worker.process.name} ended with {code} for the {STARTS}rd time; its log is rank 0's")
            )
            return
        log.warning(
            "%s ended with %s: it is started again, its %d groups go to all", worker.process.name, code, len(orders)
        )
        self._gone = self.stats_of(self._gone, worker.stats)
        fresh = self._start(worker.place, worker.starts + 1)
        fresh.rest()  # an update that goes on need not wait until it is up
        self._workers[worker.place] = fresh
        self._read(fresh)
        self._tell(fresh)
        for order in orders:
            self._hand_out(order)

    def _fail(self, error: UserError) -> None:
        """End the run: all that is under way fails, and what is asked for later."""
        self._failure = self._failure or error
        for worker in self._workers:
            for order in worker.orders.values():
                if not order.done.done():
                    order.done.set_exception(self._failure)

    @staticmethod
    def stats_of(one: ServedStats, other: ServedStats) -> ServedStats:
        """Sums of two."""
        names = (*SUMMED, "busy_seconds")
        return ServedStats(**{name: getattr(one, name) + getattr(other, name) for name in names})

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5.0)
            if worker.process.is_alive():
                worker.process.kill()
            worker.pipe.close()


async def _wait(events: list[tuple[_Worker, asyncio.Event]], seconds: float) -> None:
    """Wait for an event of each controller; one that does not come to it is ended, and then started again."""
    waits = [asyncio.wait_for(event.wait(), seconds) for _, event in events]
    ended = await asyncio.gather(*waits, return_exceptions=True)
    for (worker, _), error in zip(events, ended, strict=True):
        if isinstance(error, TimeoutError):
            log.warning("%s did not hold for new weights within %.0f s: it is ended", worker.process.name, seconds)
            worker.process.kill()


def _number(name: str, place: int) -> int:
    """Number of a server, which stays the same when others come and go; its place where the name has none."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdigit() else place
