"""Inference servers behind the engine protocol.

Whole weights change like this: no request is sent any more, those on the way are cut off and keep what they have
sampled, the servers pause and empty their caches, new weights go to all of them at the same moment, each is asked which
version it holds, and the requests that were cut off go on from their own tokens under the new weights. So every stretch
of a response was sampled by one known version, and the prefix cache, which is kept apart by version besides, never
serves what older weights computed.

Adapters change without a pause: servers load the new one beside those in use, requests name it from then on, and those
under way end under the one that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.dialect import Dialect, Stretch
from trainer.engines.http import Server, ServerPool
from trainer.engines.served_stats import EVALUATES, ServedStats
from trainer.engines.server_updates import ABORT_EVERY, Load, ServerUpdates
from trainer.engines.sharing import PrefixSharing, at_once
from trainer.hf_folder import folder_problem
from trainer.types import Completion, FinishReason, SamplingParams

log = logging.getLogger(__name__)

# With more requests than this on their way to a server nothing is read ahead on it: they may be in its queue.
ROOM = 256
# How often a response may be cut off without an update being the reason.
STRAY_ABORTS = 3


class Others(Protocol):
    """Other processes that send requests to the same servers."""

    async def hold(self) -> None:
        """Return once they send none any more."""

    async def idle(self) -> None:
        """After `hold`: return once none is under way."""

    def go_on(self) -> None:
        """Have them go on, with the servers and the version that the engine has now."""


class ServedEngine:
    """Engine protocol over any number of servers of one kind.

    Args:
        pool: the servers; give each to `join`.
        dialect: of their kind, see `make_dialect`.
        model: the folder of the weights that the run begins with; published folders must hold the same tensors.
        stop_ids: token ids that end a response, beside the model's own.
        version: of the weights that `model` holds.

    Attributes:
        versions: adapters that servers can use beside one another.
        sharing: has prompts of one key that begin alike read once.
        others: who else asks these servers, and is held back while they are updated.
    """

    def __init__(self, pool: ServerPool, dialect: Dialect, model: Path, stop_ids: set[int], version: int = 0) -> None:
        self.pool = pool
        self.dialect = dialect
        self.model = model
        self.stop_ids = sorted(stop_ids)
        self.stats = ServedStats()
        self._each = ServerUpdates(pool, dialect)
        self.versions = 1
        self._folder: Path | None = model  # of the version in use, for servers that join
        self.version = version
        """Of the weights that new responses are sampled with."""
        self._paused = False
        self.updating = False
        """Whether requests are held back for an update."""
        self._waiting: list[asyncio.Future[None]] = []
        self._under_way, self._noted = 0, 0.0
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self.others: Others | None = None
        self.sharing = PrefixSharing(self._read_prefix, self._place, self._unpaused, self._has_room)
        self.sharing.holds = not dialect.shares_batches

    @property
    def has_folder(self) -> bool:
        """Whether the present weights are in a folder, from which servers that join can load them."""
        return self._folder is not None

    async def join(self, server: Server) -> str:
        """Use this server from now on; it is given the present weights when it holds others. During an update it waits.

        A server of an unknown version (-1) is given them in any case; what somebody else left running on it is cut off.

        Returns:
            The version of the server's software.

        Raises:
            EngineError: it cannot take the weights, or does not return what training needs.
        """
        found = await self.dialect.probe(self.pool, server)
        async with self._turn():
            if server.version != self.version:
                folder, version = self._folder, self.version
                if folder is None:
                    raise EngineError(
                        f"{server.name} holds weight version {server.version}, and version {version} is in no folder "
                        "that it could load: publish a version to a folder first"
                    )
                await self._each.cut_off_before(server)
                await self._each.pause(server)
                await self._each.take(
                    server, version, lambda s: self.dialect.load_folder(self.pool, s, folder, version)
                )
                await self._each.go_on(server)
            self.pool.add(server)
        return found

    async def leave(self, server: Server) -> None:
        """Use this server no longer; returns when it has answered what it was asked."""
        await self.pool.remove(server)

    async def hold(self) -> None:
        """For an update that another process makes: send no request until `go_on`."""
        self.updating = True

    async def idle(self) -> None:
        """After `hold`: return once no server works for this engine any more; whoever updates cuts requests off."""
        while any(server.in_flight and not server.problem for server in self.pool.servers):
            await asyncio.sleep(ABORT_EVERY)

    def go_on(self, version: int) -> None:
        """After `hold`: the servers in use have these weights now."""
        self.version = version
        for server in self.pool.usable():
            server.version = version
        self.updating = False
        self._wake()

    async def pause(self) -> None:
        """Send no request until `resume`; those on the way run on."""
        self._paused = True

    async def resume(self) -> None:
        """Go on after `pause`; during an update, when that is over."""
        self._paused = False
        self._wake()

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """Sample one response; `key` (of a group) decides which server, so that a group shares one prefix cache.

        Raises:
            ValueError: the prompt is empty.
            EngineError: no server could answer, or the server refused (a prompt beyond its context length, say).
        """
        if not prompt_ids:
            raise ValueError("the prompt has no tokens")
        with self.sharing.member(key):
            return await self._whole(prompt_ids, params, key)

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """See `Engine`."""
        self.sharing.expect(prefix_ids, key)

    async def _whole(self, prompt_ids: list[int], params: SamplingParams, key: str) -> Completion:
        """A response to its end, of as many stretches as updates cut it into."""
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int]] = []
        strays = 0
        while True:
            stretch = await self._sample(prompt_ids, ids, params, key)
            ids += stretch.ids
            logprobs += stretch.logprobs
            if stretch.ids and stretch.version is not None:
                if spans and spans[-1][0] == stretch.version:
                    spans[-1] = (stretch.version, spans[-1][1] + len(stretch.ids))
                else:
                    spans.append((stretch.version, len(stretch.ids)))
            finish = stretch.finish or self._finished(ids, params)
            if finish:
                break
            if not self.held and stretch.version in (self.version, None):
                strays += 1
                if strays > STRAY_ABORTS:
                    raise EngineError(f"a server cut one response off {strays} times: see the servers' logs")
            self.stats.interrupted += 1
        self.stats.requests += 1
        self.stats.sampled_tokens += len(ids)
        oldest = min((version for version, _ in spans), default=self.version)
        return Completion(ids, logprobs, finish, oldest, tuple(spans) if len(spans) > 1 else ())

    async def update_from_folder(self, folder: Path, version: int) -> None:
        """Have every server load the weights in `folder` as `version`; see `update`. The folder must stay while in use.

        Adapters are loaded while requests flow, unless one is under way whose version servers cannot keep beside it.

        Raises:
            EngineError: the folder does not fit (then no server has heard of it), or no server took the weights.
        """
        if problem := await asyncio.to_thread(folder_problem, folder, self.model):
            raise EngineError(f"weight version {version} cannot be loaded: {problem}. The servers keep {self.version}")
        in_use = [v for server in self.pool.usable() for v, count in server.versions.items() if count]
        if self.dialect.adapters and min(in_use, default=version) > version - self.versions:
            await self._update_beside(folder, version)
        else:
            await self.update(version, lambda s: self.dialect.load_folder(self.pool, s, folder, version), folder)

    async def offer(self, folder: Path, version: int) -> None:
        """Say that this folder holds `version`, for servers that join; it must stay while that version is in use.

        With servers in use it must be the version that they hold. With none it becomes the version in use: the way on
        after the last server has died.

        Raises:
            EngineError: the folder does not fit, or servers hold another version.
        """
        async with self._turn():
            if problem := await asyncio.to_thread(folder_problem, folder, self.model):
                raise EngineError(f"weight version {version} cannot be loaded: {problem}")
            if self.pool.usable() and version != self.version:
                raise EngineError(f"servers hold weight version {self.version}, and the folder offered holds {version}")
            self.version, self._folder = version, folder

    async def update(self, version: int, load: Load, folder: Path | None = None) -> None:
        """Bring new weights onto every server. What was running goes on afterwards from its own tokens.

        `load` is called at the same moment for all servers in use, each paused with an empty cache: they are those of
        `pool.usable()` then, and stay the same while it runs but for those that die. It leaves the server reporting
        `version`. A server that cannot be shown to hold the new weights is used no more; one that changed nothing
        (UntouchedError) may stay only if no other took the update. folder: where the same weights can be loaded from by
        servers that join later; without one they cannot join until there is one.

        Raises:
            EngineError: no server took the weights. The servers that are still in use hold the old weights then.
            EngineGoneError: nor is any left in use.
        """
        async with self._turn():
            self.updating = True
            try:
                began = time.perf_counter()
                if self.others is not None:
                    await self.others.hold()
                idle = asyncio.ensure_future(self.others.idle() if self.others is not None else at_once())
                await asyncio.gather(idle, *(self._each.drain(server, idle) for server in self.pool.usable()))
                await asyncio.gather(
                    *(self._each.pause(server) for server in self.pool.usable()), return_exceptions=True
                )
                paused = time.perf_counter()
                servers = self.pool.usable()
                taken = await asyncio.gather(
                    *(self._each.take(s, version, load) for s in servers), return_exceptions=True
                )
                transferred = time.perf_counter()
                self._settle(dict(zip(servers, taken, strict=True)), folder, version)
            finally:
                for server in self.pool.usable():
                    if server.version != self.version:  # cancelled half-way
                        server.discard(f"an update to weight version {version} was broken off")
                await asyncio.gather(*(self._each.go_on(s) for s in self.pool.usable()), return_exceptions=True)
                self.updating = False
                self._wake()
                if self.others is not None:
                    self.others.go_on()
            ended = time.perf_counter()
            self._note_update(paused - began, transferred - paused, ended - transferred, ended - began)

    async def _update_beside(self, folder: Path, version: int) -> None:
        """Have every server load an adapter beside those in use, for requests that are sent from then on.

        A server that cannot is used no more where others could; it may join again. Adapters of versions that no request
        of the run can be under are unloaded.
        """
        async with self._turn():
            began = time.perf_counter()
            servers = self.pool.usable()
            taken = await asyncio.gather(
                *(self._each.add_adapter(s, folder, version) for s in servers), return_exceptions=True
            )
            results = dict(zip(servers, taken, strict=True))
            self._settle(results, folder, version)
            servers = [server for server, error in results.items() if error is None]
            for server in servers:
                server.version = version
            if self.others is not None:
                self.others.go_on()
            self._note_update(0.0, time.perf_counter() - began, 0.0, 0.0)
            oldest, routes = version - self.versions + 1, self.dialect.adapter_routes
            await asyncio.gather(*(routes.remove_before(self.pool, server, oldest) for server in servers))

    def _note_update(self, pause: float, transfer: float, resume: float, interruption: float) -> None:
        stats = self.stats
        stats.pause_seconds, stats.transfer_seconds, stats.resume_seconds = pause, transfer, resume
        stats.interruption_seconds = interruption

    def _settle(self, results: dict[Server, BaseException | None], folder: Path | None, version: int) -> None:
        """Keep the servers that agree on their weights, and go by what they hold."""
        if not results:
            self.pool.choose("")  # raises: says what became of the servers
        errors = {server: error for server, error in results.items() if error is not None}
        if len(errors) < len(results):
            self.version, self._folder = version, folder
            for server, error in errors.items():
                server.discard(f"it stayed behind at weight version {server.version}: {error}")
        for error in errors.values():
            if not isinstance(error, EngineError):  # a mistake in `load`
                raise error
        if len(errors) == len(results):
            message = f"no server took weight version {version}: {'; '.join(map(str, errors.values()))}"
            raise EngineError(message) if self.pool.usable() else EngineGoneError(message)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One update or join at a time. A lock belongs to the event loop that it was made in."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Lock()
        async with self._turns[1]:
            yield

    @property
    def held(self) -> bool:
        """Whether requests are held back, by `pause` or for an update."""
        return self._paused or self.updating

    def _wake(self) -> None:
        if self.held:
            return
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            # A future of an event loop that was closed meanwhile waits for nobody.
            if not future.done() and not future.get_loop().is_closed():
                future.set_result(None)

    async def _unpaused(self) -> None:
        while self.held:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    async def _sample(self, prompt_ids: list[int], so_far: list[int], params: SamplingParams, key: str) -> Stretch:
        ids = prompt_ids + so_far if so_far else prompt_ids  # thousands of them: a copy costs a tenth of a request
        left = params.max_new_tokens - len(so_far)
        self._note_time(1)
        try:
            sent = await self.sharing.ready(ids, key)
            server, version, answer = await self.pool.dispatch(
                self.dialect.generate_path,
                lambda server: self.dialect.request(ids, params, left, self.stop_ids, server),
                key,
                self._unpaused,
            )
        finally:
            self._note_time(-1)
        stretch, expected = self.dialect.read(answer, server.name), self.dialect.weights_named(version)
        if stretch.version not in (expected, None):
            # Somebody else changed its weights, or it was started anew: nothing it says can be placed.
            message = "an unknown weight version" if stretch.version == -1 else f"weight version {stretch.version}"
            server.discard(f"it answered with {message}, expected {expected}")
            return await self._sample(prompt_ids, so_far, params, key)
        if stretch.version is not None:
            stretch = replace(stretch, version=version)
        self.sharing.answered(sent, _place_of(server, version))
        self.stats.prompt_tokens += stretch.prompt_tokens
        self.stats.cached_tokens += stretch.cached_tokens
        if EVALUATES.get():
            self.stats.evaluated_prompt_tokens += stretch.prompt_tokens
            self.stats.evaluated_cached_tokens += stretch.cached_tokens
        self.stats.context_tokens += len(stretch.ids) * (len(ids) + len(stretch.ids) / 2)
        return stretch

    async def _read_prefix(self, ids: list[int], key: str) -> Hashable:
        """Have ids read by the key's server, and sample one token that nobody gets; for `PrefixSharing`."""
        params = SamplingParams(1)
        try:
            server, version, answer = await self.pool.dispatch(
                self.dialect.generate_path,
                lambda server: self.dialect.request(ids, params, 1, self.stop_ids, server),
                key,
                self._unpaused,
            )
            stretch = self.dialect.read(answer, server.name)
        except EngineError as error:
            log.debug("a prefix of %d tokens was not read ahead: %s", len(ids), error)
            return None
        self.stats.ahead_requests += 1
        computed = stretch.prompt_tokens - stretch.cached_tokens
        self.stats.ahead_tokens += computed
        if EVALUATES.get():
            self.stats.evaluated_ahead_tokens += computed
        # Cut off, or under other weights by now: whoever waited for it looks again.
        own = stretch.version == self.dialect.weights_named(version)
        return _place_of(server, version) if stretch.finish and own and version == server.version else None

    def _place(self, key: str) -> Hashable:
        """Server and weights that a key's next request meets; None where it has no server yet."""
        server = self.pool.home(key)
        return None if server is None else _place_of(server, server.version)

    def _has_room(self, key: str) -> bool:
        server = self.pool.home(key)
        return server is not None and not self.held and server.in_flight <= ROOM

    def _note_time(self, change: int) -> None:
        """Count the time since the last change for the requests that were under way, and take the change over."""
        now = time.perf_counter()
        if self._under_way:
            self.stats.busy_seconds += now - self._noted
            self.stats.request_seconds += self._under_way * (now - self._noted)
        self._under_way, self._noted = self._under_way + change, now

    def _finished(self, ids: list[int], params: SamplingParams) -> FinishReason | None:
        """Whether what was cut off had just come to its end anyway."""
        if ids and ids[-1] in self.stop_ids:
            return "stop"
        return "length" if len(ids) >= params.max_new_tokens else None


def _place_of(server: Server, version: int) -> Hashable:
    return server.name, server.url, version
