"""A controller process: takes tasks from rank 0, samples and scores their groups, and sends them back.

It ends with its pipe. Rank 0 says `ready` (number and task that comes next), `task` (number, order, plan, task),
`forget` (number of a task made ready that another controller has got), `servers` (those to ask: name, url, version,
generation, which tells a server from one of its name before, and `Server.idle`; whether the run has fewer than
`servers.min_required`),
`hold` (number) and `go` (version). It says `up` when it can begin, `generated` (number), `group` or `failed` (number,
trajectories or error, totals), `lost` (name and generation of a server, why, whether it hangs), `held` and `idle`
(number of what it was told).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainer.agents import make_agent
from trainer.config import RunConfig
from trainer.connections import collect_seldom
from trainer.engines.dialects import make_dialect
from trainer.engines.hang_watch import watch_for_hangs
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.engines.served_stats import ServedStats
from trainer.errors import UserError
from trainer.judge.priority_limiter import ORDER
from trainer.metrics import log_file
from trainer.paths import RunPaths
from trainer.placement import serves_adapters
from trainer.rewards.make import make_reward
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.train.model import load_tokenizer
from trainer.types import Group, Task

LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """What a controller process is made of. stop_ids, window: see `SamplerParts`."""

    config: RunConfig
    model: Path
    stop_ids: Sequence[int]
    window: int


def work(job: WorkerJob, pipe: Connection) -> None:
    """Serve rank 0 until the pipe is closed; the process's main function."""
    # Ctrl-C is for rank 0, which ends its controllers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(processName)s %(message)s")
    if (logs := RunPaths.of(job.config).logs).is_dir():
        # Why trajectories and rewards fail is looked for there; what becomes of servers rank 0 tells itself.
        logging.getLogger("trainer.rollout").addHandler(log_file(logs / "main.log"))
    with suppress(asyncio.CancelledError):
        asyncio.run(_Controller(job, pipe).run())


class _Controller:
    def __init__(self, job: WorkerJob, pipe: Connection) -> None:
        config = job.config
        self.pipe, self.config = pipe, config
        tokenizer = load_tokenizer(job.model)
        agent = make_agent(config, tokenizer)
        dialect = make_dialect("sglang" if config.engine == "sglang" else "vllm", serves_adapters(config))
        self.pool = ServerPool(dialect.health_path, Limits.beside(config.serving.hang_seconds))
        # Of this share of the servers the last one may be lost: rank 0 then tells others, and whether all are enough.
        self.pool.least, self.pool.patience = 1, config.serving.patience_seconds or config.serving.start_seconds
        self.pool.hangs_allowed = max(config.serving.restarts, 1)
        self.engine = ServedEngine(self.pool, dialect, job.model, set(job.stop_ids))
        self.engine.sharing.enabled = config.rollout.share_prefixes
        self.engine.sharing.ahead = config.rollout.prefetch_sections
        self.controller = RolloutController(
            agent, self.engine, config.seed, reward=make_reward(config, tokenizer), window=job.window
        )
        self._own: dict[str, tuple[int, Server]] = {}  # by name; one that was lost stays until rank 0 names another
        self._told_lost: set[tuple[str, int]] = set()
        self._jobs: set[asyncio.Task[None]] = set()
        self._prepared: dict[int, asyncio.Task[Any]] = {}
        self._sending = threading.Lock()

    async def run(self) -> None:
        """Do what rank 0 says until the pipe is closed."""
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[Any] = asyncio.Queue()

        def receive() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(messages.put_nowait, pickle.loads(self.pipe.recv_bytes()))
            except (OSError, EOFError):
                os._exit(0)  # rank 0 has ended: nobody wants what is under way
            except Exception:  # of a class of the user's own, say
                traceback.print_exc()
            os._exit(1)

        collect_seldom()
        await self.engine.hold()  # until the first version is named
        threading.Thread(target=receive, daemon=True).start()
        self._keep(self._look())
        self._keep(watch_for_hangs(self.engine, self.config.serving.hang_seconds))
        self._say("up")
        while True:
            what, *rest = await messages.get()
            if what == "task":
                self._keep(self._group(*rest))
            elif what == "ready":
                self._make_ready(*rest)
            elif what == "forget":
                self._forget(rest[0])
            elif what == "servers":
                self._use(*rest)
            elif what == "hold":
                await self.engine.hold()
                self._say("held", rest[0])
                self._keep(self._idle(rest[0]))
            elif what == "go":
                self.engine.go_on(rest[0])

    def _keep(self, coroutine: Any) -> None:
        job = asyncio.ensure_future(coroutine)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def _group(self, number: int, order: int, plan: SamplingPlan, task: Task) -> None:
        ORDER.set(order)
        try:
            ready = self._prepared.pop(number, None)
            prepared = await (self._prepare(task) if ready is None else ready)
            group = await self.controller.group(task, prepared, plan, lambda: self._say("generated", number))
            data = await asyncio.to_thread(_pickled, number, group, replace(self.engine.stats))
        except Exception as error:
            data = pickle.dumps(("failed", number, _sendable(error), replace(self.engine.stats)))
        await asyncio.to_thread(self._send, data)

    async def _idle(self, number: int) -> None:
        await self.engine.idle()
        self._say("idle", number)

    def _make_ready(self, number: int, task: Task) -> None:
        job = asyncio.ensure_future(self._prepare(task))
        job.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised where it is wanted
        self._prepared[number] = job

    def _forget(self, number: int) -> None:
        if job := self._prepared.pop(number, None):
            job.cancel()

    async def _prepare(self, task: Task) -> Any:
        return await asyncio.to_thread(self.controller.agent.prepare, task)

    def _use(self, servers: list[tuple[str, str, int, int, float]], short: bool) -> None:
        """Ask these servers from now on; what others are answering is waited for.

        servers: see the message. short: all servers of the run are too few, so that requests wait for more.
        """
        self.pool.least = len(servers) + 1 if short else 1
        wanted = {(name, generation) for name, _, _, generation, _ in servers}
        for name, (generation, server) in list(self._own.items()):
            if (name, generation) not in wanted:
                del self._own[name]
                server.discard("rank 0 uses it no longer")  # now: one of its name may be added below
                self._keep(self.pool.remove(server))
        for name, url, version, generation, idle in servers:
            if name not in self._own:
                server = Server(name, url, version, idle=idle)
                self._own[name] = generation, server
                self.pool.add(server)

    async def _look(self) -> None:
        """Tell rank 0 of servers that were lost."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for name, (generation, server) in self._own.items():
                if server.problem and (name, generation) not in self._told_lost:
                    self._told_lost.add((name, generation))
                    self._say("lost", name, generation, server.problem, server.hangs)

    def _say(self, *message: Any) -> None:
        self._send(pickle.dumps(message))

    def _send(self, data: bytes) -> None:
        with self._sending:
            self.pipe.send_bytes(data)


def _pickled(number: int, group: Group, stats: ServedStats) -> bytes:
    try:
        return pickle.dumps(("group", number, group.trajectories, stats))
    except Exception as error:
        raise UserError(
            f"task {group.task.id}: what the agent or the reward left in a trajectory cannot be sent to rank 0 "
            f"({type(error).__name__}: {error}): leave plain values there, or set rollout.controllers=0"
        ) from error


def _sendable(error: Exception) -> Exception:
    """The error, or one with its text where pickle cannot make it again, as with many classes of libraries."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
