"""Controllers in processes of their own: each asks a part of the servers, and rank 0 gets whole groups.

One process makes, sends and reads some hundred requests a second; a fleet of small models answers more. With
`rollout.controllers` rank 0 keeps the data, the work buffer, the versions of the weights and the list of servers, and
hands out tasks. A controller process has the same agent, reward and engine as rank 0 would, for every so manieth
server, and sends back a group with its token ids as arrays. When one dies its tasks are taken up by the others, and it
is started again. What it does is in `trainer.rollout.worker`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, fields
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from trainer.config import RunConfig
from trainer.engines.http import Server
from trainer.engines.served import ServedEngine
from trainer.engines.served_stats import ServedStats
from trainer.errors import RunError, UserError
from trainer.rollout.controller import SamplingPlan
from trainer.rollout.worker import WorkerJob, work
from trainer.types import Group, Task

log = logging.getLogger("trainer")

FOLLOW_SECONDS = 1.0
HOLD_SECONDS, IDLE_SECONDS = 600.0, 60.0
"""How long a controller may take to hear of an update, which a reward that computes may delay, and to come to rest."""
STARTS, START_SECONDS = 3, 900.0
"""So often a controller is started within this time before the run ends: one that always dies has a fault of its own.
And so often may one die that has the same task."""
LAST = ("pause_seconds", "transfer_seconds", "resume_seconds", "interruption_seconds")
SUMMED = tuple(one.name for one in fields(ServedStats) if one.name not in ("busy_seconds", *LAST))
"""Running totals that are those of all controllers together."""


@dataclass(eq=False)
class _Order:
    """A group that a controller is to make.

    order: of its admission, see `trainer.judge.priority_limiter`. deaths: of controllers that had it.
    """

    number: int
    task: Task
    order: int
    plan: SamplingPlan
    generated: Callable[[], None]
    done: asyncio.Future[Group]
    deaths: int = 0


@dataclass(eq=False)
class _Worker:
    """A controller's process.

    starts: times at which one was started at its place, this one last. unsendable: hears what cannot be sent.
    orders: what it is at, by number. up: it can begin. held: it sends no requests. idle: nor is any under way.
    ready: tasks that it has made ready. stats: its engine's running totals. servers: of its own.
    """

    place: int
    process: Any
    pipe: Connection
    starts: tuple[float, ...]
    unsendable: Callable[[str, Exception], None]
    orders: dict[int, _Order] = field(default_factory=dict)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    up: bool = False
    ready: set[int] = field(default_factory=set)
    stats: ServedStats = field(default_factory=ServedStats)
    servers: int = 1
    _unsent: SimpleQueue[tuple[Any, ...] | None] = field(default_factory=SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._send, name=f"to {self.process.name}", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send it, in order, in a thread: a task may be a megabyte, and a process that hangs reads nothing."""
        self._unsent.put(message)

    def _send(self) -> None:
        alive = True
        while (message := self._unsent.get()) is not None:
            try:
                if alive:
                    self.pipe.send_bytes(pickle.dumps(message))
            except OSError:  # it has died, which its reader notices
                alive = False
            except Exception as error:  # of a task of the user's own, say
                alive = False
                self.unsendable(self.process.name, error)
        self.pipe.close()

    def end(self) -> None:
        """Close its pipe; the process has ended."""
        self._unsent.put(None)

    def rest(self) -> None:
        """Nothing is to be waited for."""
        self.held.set()
        self.idle.set()


class Workers:
    """The controller processes of a run. Made anywhere; all else on the engine's event loop.

    Args:
        config, model: of the run. stop_ids, window: as of the controller in rank 0. engine: rank 0's. make_task:
            makes a task from its number, in any thread.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Path,
        stop_ids: set[int],
        window: int,
        engine: ServedEngine,
        make_task: Callable[[int], Task],
    ) -> None:
        self._job = WorkerJob(config, model, sorted(stop_ids), window)
        self._engine, self._make_task = engine, make_task
        self._tasks: dict[int, asyncio.Task[Task]] = {}  # made ready and not yet wanted
        self._jobs: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[Server, int] = {}
        self._told: list[tuple[Any, ...]] = []
        self._short = False
        self._gone = ServedStats()  # of processes that have ended
        self._closing, self._holds = False, 0
        self._failure: UserError | None = None
        self._workers = [self._start(place) for place in range(config.rollout.controllers)]

    # -- groups -----------------------------------------------------------------------------------------------------

    async def group(self, number: int, order: int, plan: SamplingPlan, generated: Callable[[], None]) -> Group:
        """Have the group of a task sampled and scored; see `RolloutController.group`."""
        loop = self._listen()
        task = await (self._tasks.pop(number, None) or self._made(number))
        made = _Order(number, task, order, plan, generated, loop.create_future())
        self._hand_out(made)
        return await made.done

    def make_ready(self, numbers: Sequence[int]) -> None:
        """Have the tasks of these numbers made ready, which will be wanted next."""
        self._listen()
        fresh = [number for number in numbers if number not in self._tasks]
        for position, number in enumerate(fresh):
            self._tasks[number] = task = self._kept(self._made(number))
            self._kept(self._send_ready(number, task, position % len(self._workers)))

    async def _made(self, number: int) -> Task:
        return await asyncio.to_thread(self._make_task, number)

    async def _send_ready(self, number: int, task: asyncio.Task[Task], place: int) -> None:
        await asyncio.wait({task})
        if self._tasks.get(number) is task and task.exception() is None:  # else it is wanted already, or will tell then
            worker = self._workers[place]
            worker.ready.add(number)
            worker.send("ready", number, task.result())

    def _kept(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        job = asyncio.get_running_loop().create_task(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

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
        worker.send("task", order.number, order.order, order.plan, order.task)

    # -- servers and versions ---------------------------------------------------------------------------------------

    def tell_servers(self) -> None:
        """Tell the controllers which servers there are, and whether these are enough, where that has changed."""
        self._listen()
        pool = self._engine.pool
        usable = sorted(pool.usable(), key=lambda server: server.name)
        told, short = [(one.name, one.url, one.version, self._generation(one), one.idle) for one in usable], pool.short
        if short and not self._short:
            pool.tell_short()
        if (told, short) != (self._told, self._short):
            self._told, self._short = told, short
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
        worker.send("servers", own or self._told, self._short)

    def _generation(self, server: Server) -> int:
        return self._generations.setdefault(server, len(self._generations))

    # -- numbers ----------------------------------------------------------------------------------------------------

    def stats(self, own: ServedStats) -> ServedStats:
        """Running totals of rank 0's engine and of all controllers'."""
        every = [own, self._gone, *(worker.stats for worker in self._workers)]
        totals = ServedStats(**{name: sum(getattr(one, name) for one in every) for name in SUMMED})
        # At the same time, not one after the other.
        totals.busy_seconds = own.busy_seconds + max(one.busy_seconds for one in every[1:])
        for name in LAST:
            setattr(totals, name, getattr(own, name))
        return totals

    def pids(self) -> list[int]:
        """Process ids of the controllers."""
        return [worker.process.pid for worker in self._workers]

    # -- processes --------------------------------------------------------------------------------------------------

    def _start(self, place: int, before: tuple[float, ...] = ()) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(self._job, there), name=f"controller-{place}", daemon=True)
        process.start()
        there.close()
        return _Worker(place, process, here, (*before, time.monotonic()), self._cannot_send)

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
            name, generation, problem, hangs = rest
            for server, known in self._generations.items():
                if (server.name, known) == (name, generation):
                    server.hang(problem) if hangs else server.discard(problem)
        elif order := worker.orders.get(rest[0]):
            if what == "generated":
                order.generated()
                return
            del worker.orders[order.number]
            _, value, worker.stats = rest
            if not order.done.done() and what == "failed":
                order.done.set_exception(value)
            elif not order.done.done():
                order.done.set_result(Group(order.task, value))

    def _lost(self, worker: _Worker) -> None:
        """Start a controller again that has died, and hand its tasks out anew."""
        worker.rest()
        if self._closing:
            return
        worker.process.join(1.0)
        code, orders = worker.process.exitcode, list(worker.orders.values())
        starts = tuple(one for one in worker.starts if time.monotonic() - one < START_SECONDS)
        for order in orders:
            order.deaths += 1
        worst = max(orders, key=lambda order: order.deaths, default=None)
        if len(starts) >= STARTS or (worst is not None and worst.deaths >= STARTS):
            how = f"for the {STARTS}rd time within {START_SECONDS / 60:.0f} minutes"
            if worst is not None and worst.deaths >= STARTS:
                how = f"and had task {worst.task.id}, as {STARTS - 1} before it that ended"
            self._fail(RunError(f"{worker.process.name} ended with {code} {how}; its log is rank 0's"))
            return
        log.warning(
            "%s ended with %s: it is started again, its %d groups go to all", worker.process.name, code, len(orders)
        )
        for name in (*SUMMED, "busy_seconds"):
            setattr(self._gone, name, getattr(self._gone, name) + getattr(worker.stats, name))
        worker.end()
        fresh = self._start(worker.place, starts)
        fresh.rest()  # an update that goes on need not wait until it is up
        self._workers[worker.place] = fresh
        self._read(fresh)
        self._tell(fresh)
        for order in orders:
            self._hand_out(order)

    def _cannot_send(self, name: str, error: Exception) -> None:
        text = f"{name}: a task cannot be sent to it ({type(error).__name__}: {error})"
        assert self._loop is not None
        unsendable = UserError(f"{text}: tasks must be picklable; or set rollout.controllers=0")
        self._loop.call_soon_threadsafe(self._fail, unsendable)

    def _fail(self, error: UserError) -> None:
        """End the run: all that is under way fails, and what is asked for later."""
        self._failure = self._failure or error
        for worker in self._workers:
            for order in worker.orders.values():
                if not order.done.done():
                    order.done.set_exception(self._failure)

    def close(self) -> None:
        """End the processes."""
        self._closing = True
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(5.0)
            if worker.process.is_alive():
                worker.process.kill()
            worker.end()


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
