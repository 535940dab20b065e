"""Keeps the servers that the trainer samples from in step with the registrations: they join, leave and come back."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from trainer.config import RunConfig
from trainer.engines.base import EngineError
from trainer.engines.http import Server, ServerFailedError, ServerLostError
from trainer.engines.served import ServedEngine
from trainer.errors import CrashError, RunError
from trainer.hf_folder import weights_digest
from trainer.placement import served_layers, served_rank, served_versions
from trainer.serving import registry
from trainer.serving.keeper import earlier_weights
from trainer.serving.registry import Registration

log = logging.getLogger("trainer")

LOOK_SECONDS = 1.0
TELL_SECONDS = 60.0
JOIN_AGAIN_SECONDS = 5.0
"""Before a server that did not answer well while it joined is tried once more; then doubled."""
MOST_DOUBLED = 6
"""That is 320 s."""
ASK_SECONDS = 5.0
"""For an answer of one that is tried again: while servers join, no others come or go."""
ASKED = "it was asked to leave"
UNKNOWN = -1
"""Version of weights that may be torn: they are loaded anew."""


class Fleet:
    """Watches the registrations of a run and lets servers join and leave its engine.

    All methods run on the engine's event loop.
    """

    def __init__(self, engine: ServedEngine, folder: Path, config: RunConfig) -> None:
        self.engine, self.folder, self.config = engine, folder, config
        self._joined: dict[str, tuple[float, Server]] = {}
        self._refused: dict[str, tuple[float, float]] = {}  # start, and when it is tried again
        self._failures: dict[tuple[str, float], tuple[int, float]] = {}  # of a start to join: how many, since when
        self._hung: dict[tuple[str, float], str] = {}  # starts of servers that are to be started again, and why
        self._last: dict[str, str] = {}  # why servers left
        self._base = ""  # digest of the weights that the run begins with
        self._before = ""  # of those that its supervised start began with
        self._layers: tuple[str, ...] = ()  # that its adapters are for
        self._doubtful: dict[str, float] = {}  # starts of servers whose weights may be torn
        self._ours: set[tuple[str, float]] = set()  # starts of servers that had their weights from this attempt
        self._looking = asyncio.Lock()  # `watch` and `ready` look at the same time, and a join takes seconds
        self.wants_folder = False
        """Whether a server waits for the present weights in a folder, to join."""

    @property
    def required(self) -> int:
        """Servers that must answer before the first step.

        All, where SGLang's share the trainer's GPUs: they read weights there, and one that starts takes memory there.
        """
        allocation, everyone = self.config.allocation, max(self.config.num_servers, 1)
        if allocation is not None and allocation.colocated and self.config.engine == "sglang":
            return everyone
        return self.config.serving.min_required or everyone

    def usable(self) -> int:
        """Servers that get requests now."""
        return len(self.engine.pool.usable())

    async def ready(self) -> None:
        """Return once the required servers answer.

        Raises:
            RunError: too many were given up, or they took too long; says what became of each.
        """
        deadline = time.monotonic() + self.config.serving.start_seconds + TELL_SECONDS
        last_message = time.monotonic()
        while True:
            found = await self.look()
            if self.usable() >= self.required:
                names = ", ".join(server.name for server in self.engine.pool.usable())
                log.info("%d engine servers answer: %s", self.usable(), names)
                return
            given_up = [one for one in found if one.state == "ended"]
            if (given_up and len(found) - len(given_up) < self.required) or time.monotonic() > deadline:
                raise RunError(self.missing(found))
            if time.monotonic() - last_message > TELL_SECONDS:
                last_message = time.monotonic()
                log.info("waiting for engine servers: %s", self.missing(found))
            await asyncio.sleep(LOOK_SECONDS)

    async def watch(self) -> None:
        """Follow the registrations until cancelled."""
        while True:
            try:
                await self.look()
            except OSError as error:  # a hiccup of the shared storage
                log.warning("the servers' folder cannot be read: %s", error)
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> list[Registration]:
        """Apply what has changed in the registrations since the last call; returns them. One call at a time."""
        async with self._looking:
            return await self._look()

    async def _look(self) -> list[Registration]:
        found = await asyncio.to_thread(registry.read, self.folder)
        ready = {one.name: one for one in found if one.state == "ready" and not one.out_of_reach}
        for name, (started, server) in list(self._joined.items()):
            now = ready.get(name)
            if now is None or now.started != started or server.problem:
                del self._joined[name]
                self._last[name] = server.problem or ASKED  # first: `missing` may be called during the wait
                if server.doubtful:
                    self._doubtful[name] = started
                if server.hangs:
                    self._start_again(name, started, server.problem)
                if not server.problem:
                    await self.engine.leave(server)
        there = {(one.name, one.started) for one in found}
        self._failures = {start: count for start, count in self._failures.items() if start in there}
        for one in ready.values():  # again and again until its host has done so
            if why := self._hung.get((one.name, one.started)):
                try:
                    await asyncio.to_thread(registry.ask_restart, self.folder, one, why)
                except OSError as error:  # a full disk, say: others may join all the same
                    self._tell_once(one, f"its host cannot be asked to start it again: {error}")
        fresh = [one for one in ready.values() if one.name not in self._joined and self._may_join(one)]
        await asyncio.gather(*(self._join(one) for one in fresh))
        return found

    def _may_join(self, one: Registration) -> bool:
        started, again = self._refused.get(one.name, (0.0, 0.0))
        hangs = (one.name, one.started) in self._hung
        return not hangs and (started != one.started or time.monotonic() >= again)

    def _start_again(self, name: str, started: float, why: str) -> None:
        log.warning("engine server %s hangs: its host is asked to kill it and to start it again", name)
        self._hung[name, started] = why

    async def _join(self, one: Registration) -> None:
        server = Server(one.name, one.url, idle=one.idle)
        try:
            problem = await self._foreign(one)
        except (OSError, ValueError) as error:  # a hiccup of shared storage, say: look again
            self._tell_once(one, f"the weights that the run begins with cannot be read: {error}")
            return
        try:
            if problem:
                raise EngineError(problem)
            if (one.name, one.started) in self._failures:
                await self.engine.pool.call(server, "GET", self.engine.dialect.health_path, None, ASK_SECONDS)
            await self.engine.dialect.go_on(self.engine.pool, server)  # an update that was broken off left it paused
            server.version = await self.engine.dialect.held_version(self.engine.pool, server)
            # One that outlived an earlier attempt may hold other weights of a version's number, or torn ones: that
            # attempt may have been killed between two tensors. One that was started beside the supervised start, or
            # again with the same model, holds those of before; so may one whose host could not tell.
            other = one.kept or (bool(self.config.supervised.dataset) and one.base != self._base)
            earlier = other and (one.name, one.started) not in self._ours
            if earlier or self._doubtful.get(one.name) == one.started:
                server.version = UNKNOWN
            if server.version != self.engine.version and not self.engine.has_folder:
                self.wants_folder = True  # the next version brings one
                return
            version = await self.engine.join(server)
        except EngineError as error:
            if server.doubtful:
                self._doubtful[one.name] = one.started
            self._refuse(one, error, for_good=server.doubtful)  # that load took as long as it may
            return
        self.wants_folder = False
        self._joined[one.name] = (one.started, server)
        self._ours.add((one.name, one.started))
        self._last.pop(one.name, None)
        self._doubtful.pop(one.name, None)
        self._failures.pop((one.name, one.started), None)
        log.info("engine server %s joins (%s %s, %s)", one.name, one.engine, version, one.url)

    def _refuse(self, one: Registration, error: EngineError, for_good: bool) -> None:
        """Do not use a server until it is started anew; one that only failed to answer is tried again after a while."""
        start, again = (one.name, one.started), float("inf")
        if isinstance(error, ServerLostError | ServerFailedError) and not for_good:
            count, since = self._failures.get(start, (0, time.monotonic()))
            self._failures[start] = count + 1, since
            again = time.monotonic() + JOIN_AGAIN_SECONDS * 2 ** min(count, MOST_DOUBLED)
            silent = time.monotonic() - since
            if 0 < self.config.serving.hang_seconds < silent:
                self._start_again(*start, f"it could not join for {silent:.0f} s: {error}")
        if self._refused.get(one.name, (None,))[0] != one.started or self._last.get(one.name) != str(error):
            log.warning("engine server %s cannot be used: %s", one.name, error)
        self._refused[one.name] = (one.started, again)
        self._last[one.name] = str(error)

    def _tell_once(self, one: Registration, problem: str) -> None:
        if self._last.get(one.name) != problem:
            self._last[one.name] = problem
            log.warning("engine server %s cannot be used yet: %s", one.name, problem)

    async def _foreign(self, one: Registration) -> str:
        """Why the weights or adapters that a server was started for are not this run's; empty where they are.

        Raises:
            OSError, ValueError: those of the run cannot be read now.
        """
        if not self._base:
            self._layers = await asyncio.to_thread(served_layers, self.config, self.engine.model)
            self._before = await asyncio.to_thread(earlier_weights, self.config)
            self._base = await asyncio.to_thread(weights_digest, self.engine.model)
        wanted = served_rank(self.config), self._layers, served_versions(self.config)
        if one.serves(self._base, *wanted) or (self._before and one.serves(self._before, *wanted)):
            return ""
        return (
            f"it was started with other weights than the run begins with ({one.model}, now {self.engine.model}), "
            "or for other adapters: end it with `clusterkit serve stop`, and add another one"
        )

    async def lost(self) -> RunError:
        """Error of a run whose servers are all gone."""
        found = await asyncio.to_thread(registry.read, self.folder)
        return CrashError(f"no engine server came back within {self.engine.pool.patience:.0f} s: {self.missing(found)}")

    def missing(self, found: list[Registration]) -> str:
        """What became of the missing servers, and what to do, in words."""
        joined = {name: server.problem or ASKED for name, (_, server) in self._joined.items()}
        fates = {name: f"{name}: {why}" for name, why in (joined | self._last).items()}
        fates |= {one.name: f"{one.name} on {one.node}: {self._fate(one)}" for one in found}
        reasons = "; ".join(fates[name] for name in sorted(fates)) or "none was started"
        return (
            f"{self.usable()} of {self.required} engine servers answer ({reasons}). Their logs are in {self.folder}; "
            "correct what they name and start the same command again, or lower servers.min_required"
        )

    def _fate(self, one: Registration) -> str:
        """Why a registered server gets no requests."""
        if not one.alive_here() and one.state != "ended":
            return "its host process was killed"
        return one.reason or (self._last.get(one.name, "") if one.state == "ready" else "") or one.state
