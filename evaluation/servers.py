"""Servers of one evaluation: started together, and each started again when it dies or hangs, so often at most."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

from evaluation.progress import say
from evaluation.steps import weights_stamp
from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.dialect import Kind
from trainer.engines.hang_watch import watch_for_hangs
from trainer.engines.http import PURPOSE, Server, ServerHungError, first_names
from trainer.engines.launching import launch
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerProcess
from trainer.engines.served import ServedEngine
from trainer.errors import RunError, UserError
from trainer.types import Completion, SamplingParams

POLL_SECONDS = 0.2
END_SECONDS = 5.0
"""How long a process that was killed may take to end after its connections broke."""
MOST_HANGS = 3
"""Servers that may hang at one request before its question is left out. Before the last, such requests are asked one at
a time: those that were only beside the one that hangs servers are answered then."""


class KeptServers:
    """Engine over servers that are started again when they die; a request that finds none waits for one.

    Args:
        engine: engine over an empty pool. hang_seconds: see `watch_for_hangs`.
    """

    def __init__(
        self,
        kind: Kind,
        engine: ServedEngine,
        options: Sequence[ServerOptions],
        restarts: int,
        hang_seconds: float = 0.0,
    ) -> None:
        self.served, self.kind, self.options, self.restarts = engine, kind, options, restarts
        self._hang_seconds = hang_seconds
        engine.pool.tells_hangs = True
        self._hung_at: Counter[str] = Counter()  # PURPOSE of requests: servers that hung at them
        self._left_out: set[str] = set()
        self._alone = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None
        self._running: dict[str, ServerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stamps = [weights_stamp(one.model) for one in options]

    async def start(self) -> list[str]:
        """Start all servers; returns the versions of their software.

        Raises:
            UserError: one cannot be started here; with the cause from its log, where it ended.
        """
        started = await asyncio.gather(*(launch(self.kind, one) for one in self.options), return_exceptions=True)
        running = [found for found in started if not isinstance(found, BaseException)]
        self._running = {server.name: process for server, process in running}
        for found in started:
            if isinstance(found, BaseException):
                raise found
        versions = [await self.served.join(server) for server, _ in running]
        for options, (server, _) in zip(self.options, running, strict=True):
            self._keepers.append(asyncio.create_task(self._keep(options, server)))
        self._watch = asyncio.create_task(watch_for_hangs(self.served, self._hang_seconds))
        return versions

    async def close(self) -> None:
        """End them all."""
        jobs = [*self._keepers, *filter(None, [self._watch])]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for server in self.served.pool.servers:
            server.problem = server.problem or "the evaluation is over"  # its end is no news
        await self.served.pool.close()
        await asyncio.gather(*(process.stop() for process in self._running.values()))

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """Sample one response; from its start on another server, or on one that came back, where one was lost.

        Raises:
            EngineGoneError: all were given up, with what became of each.
            EngineError: its question is left out, as `MOST_HANGS` servers hung at it; or see `ServedEngine.generate`.
        """
        purpose, hangs = PURPOSE.get() or key, 0
        told = f"{MOST_HANGS} times an engine server hung at the same request"
        while True:
            async with self._alone if hangs == MOST_HANGS - 1 else nullcontext():
                if purpose in self._left_out:
                    raise EngineError(
                        f"{told}. Look for the cause in the servers' logs; change server.flags or the engine's "
                        "version, or raise server.hang_seconds where such an answer only takes long"
                    )
                while not self.served.pool.usable() and self._may_come_back():
                    await asyncio.sleep(POLL_SECONDS)
                if self._watch is not None and self._watch.done():
                    self._watch.result()  # without it servers that hang would be kept
                try:
                    return await self.served.generate(prompt_ids, params, key=key)
                except ServerHungError:
                    hangs += 1
                    if hangs == MOST_HANGS:
                        self._left_out.add(purpose)
                        say(f"{told}, of {purpose}: this question is left out as failed")
                except EngineGoneError:
                    if not self._may_come_back():
                        raise

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """See `Engine`."""
        self.served.prefetch(prefix_ids, key=key)

    def _may_come_back(self) -> bool:
        return any(not keeper.done() for keeper in self._keepers)

    async def _keep(self, options: ServerOptions, server: Server) -> None:
        process: ServerProcess | None = self._running[options.name]
        for number in range(1, self.restarts + 1):
            await self._lost(server, process)
            say(f"{options.name} is lost: {server.problem}. It is started again ({number} of {self.restarts})")
            await self._running[options.name].stop()  # one that hangs still has its GPUs
            process = None
            try:
                fresh, self._running[options.name] = await launch(self.kind, options)
                if weights_stamp(options.model) not in self._stamps:
                    raise RunError(f"the weights in {options.model} were replaced: it would answer for others")
                await self.served.join(fresh)
            except UserError as error:
                server.problem = f"it did not start again: {error}"
                continue
            server, process = fresh, self._running[options.name]
            say(f"{options.name} answers again")
        await self._lost(server, process)
        say(f"{options.name} is lost: {server.problem}. It is given up")

    async def _lost(self, server: Server, process: ServerProcess | None) -> None:
        """Wait until a server gets no requests any more; its problem then says how it ended, or at what it hangs."""
        while not server.problem:
            await asyncio.sleep(POLL_SECONDS)
        # A broken connection is often noticed first, and says less than the signal or the cause in the log.
        deadline = time.monotonic() + END_SECONDS
        while process is not None and process.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if process is not None and not process.running:
            server.died(f"it {process.how_it_ended()}")
        if server.hung_at:
            self._hung_at.update(server.hung_at)
            names = sorted(server.hung_at, key=lambda name: (-self._hung_at[name], name))
            counted = [f"{name} ({self._hung_at[name]} times)" if self._hung_at[name] > 1 else name for name in names]
            server.problem += f"; these questions were under way: {first_names(counted)}"
