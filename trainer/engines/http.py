"""Requests to several inference servers over one pooled client.

A response that was being sampled on a server that died is sampled again on another: that changes nothing on any
server. Calls that change something (a weight update, a pause) are sent once, to one server, and never repeated.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from trainer.connections import IDLE_OF_SERVERS_S, JSON, LAST, KeptConnections, LoopLag, open_session
from trainer.engines.base import EngineError, EngineGoneError
from trainer.errors import RunError, UserError

log = logging.getLogger(__name__)

Json = dict[str, Any]

KEYS_KEPT = 1 << 16
"""Keys whose server is remembered."""
NAMED = 8
"""Tasks that an error names."""
BUSY = 3
"""Times as many hangs at one request end a run although others were answered between: one that has bad luck is done."""
WAIT_SECONDS = 0.2
LAGGED = 0.2
"""A connection that was not made in time counts for nothing where this process was kept from it for so much of that."""

PURPOSE: ContextVar[str] = ContextVar("purpose", default="")
"""What the requests of this context are for, where an error names those that a server hung at; empty: their key."""

REQUEST_SECONDS = 1800.0
# Until the end of a server's process is noticed at the latest.
NOTICE_SECONDS = 0.5


class ServerLostError(EngineError):
    """The connection failed, or no answer came in time: the server may be gone."""


class ServerFailedError(EngineError):
    """The server answered with a 5xx or 429 status: another try may succeed."""


class RefusedError(EngineError):
    """The server understood and refused (4xx): the same request would be refused again."""


class ServerHungError(EngineError):
    """The server that had the request hangs: raised where the pool `tells_hangs`, in place of asking another."""


class HangsServersError(RunError):
    """Servers hang, one after the other, at the same request: it ends the run, which would wait for it for ever."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait, in seconds, and how often to try.

    connect: for a connection. request: for the answer to a sampling request (see `Limits.beside`). control: for others.
    health: for the health check that decides whether a server that failed a request is gone.
    attempts: tries of one request on servers that are there but fail. backoff: before the second try; then doubled.
    """

    connect: float = 5.0
    request: float = REQUEST_SECONDS
    control: float = 60.0
    health: float = 30.0
    attempts: int = 5
    backoff: float = 0.2

    @classmethod
    def beside(cls, hang_seconds: float) -> Limits:
        """Those beside a watch that gives up servers that hang: requests wait until it has, 0: without end."""
        return cls(request=max(REQUEST_SECONDS, 3 * hang_seconds) if hang_seconds else math.inf)


@dataclass(slots=True, eq=False)
class Server:
    """One server. version: of the weights it holds; -1: unknown. problem: why it gets no requests (empty: it does).

    in_flight: requests that it is at; versions: how many of them were sent under each version. role: what it is to the
    user, in words. doubtful: its weights may be of two versions, whatever it says. idle: after so many seconds it
    closes an idle connection. chosen: number of the pool's choice that it was last. owing: monotonic time since which
    it owes an answer, if in_flight. hangs: it was given up because it does nothing, and its process may still run.
    calls: of the sampling requests that it is at, with their PURPOSE or key. hung_at: those of the ones it hung at.
    """

    name: str
    url: str
    version: int = 0
    problem: str = ""
    in_flight: int = 0
    versions: Counter[int] = field(default_factory=Counter)
    role: str = "engine server"
    doubtful: bool = False
    idle: float = IDLE_OF_SERVERS_S
    chosen: int = 0
    owing: float = 0.0
    hangs: bool = False
    calls: dict[asyncio.Timeout, str] = field(default_factory=dict, repr=False)
    hung_at: set[str] = field(default_factory=set, repr=False)

    def discard(self, problem: str) -> None:
        """Send it no more requests; the first reason is the one that is kept."""
        if not self.problem:
            self.problem = problem
            log.warning("%s %s is no longer used: %s", self.role, self.name, problem)

    def hang(self, problem: str) -> None:
        """Send it no more requests, and wait no longer for those that it has. Call this on its event loop."""
        self.hangs = True
        self.discard(problem)
        self.hung_at |= set(self.calls.values())
        while self.calls:  # each once, however many controllers say that it hangs
            self.calls.popitem()[0].reschedule(0.0)

    def died(self, how: str) -> None:
        """Its process has ended: that says more than the connections that broke just before."""
        self.discard(how)
        self.problem = how


class ServerPool:
    """The servers that requests go to; servers may join and leave at any time."""

    def __init__(self, health_path: str, limits: Limits | None = None) -> None:
        self.health_path = health_path
        self.limits = limits or Limits()
        self.servers: list[Server] = []
        self.least = 1
        """Servers below which requests wait for others to come."""
        self.patience = 0.0
        """Seconds that a request waits for them before it fails; 0: it fails at once."""
        self.hangs_allowed = 0
        """Servers that may hang at one request, while no request is answered, or `BUSY` times as many; 0: any."""
        self.tells_hangs = False
        """Whether a hang is told at once to who asked, who then counts them."""
        self.answers = 0
        self._homes: OrderedDict[str, Server] = OrderedDict()
        self._choices = 0
        self._told_short = False
        self.redispatched = 0
        self._connections: dict[asyncio.AbstractEventLoop, _Connections] = {}

    def add(self, server: Server) -> None:
        """Send requests to this server too. Raises ValueError when its name is taken by one in use."""
        if any(s.name == server.name for s in self.usable()):
            raise ValueError(f"there is a server {server.name} already")
        self.servers = [s for s in self.servers if s.name != server.name] + [server]

    async def remove(self, server: Server) -> None:
        """Send it no new requests and wait until it has answered those it has."""
        server.discard("it was asked to leave")
        while server.in_flight:
            await asyncio.sleep(0.01)
        self.servers = [s for s in self.servers if s is not server]

    def usable(self) -> list[Server]:
        """The servers that get requests."""
        return [server for server in self.servers if not server.problem]

    def choose(self, key: str, avoid: Server | None = None) -> Server:
        """The server for a key: always the same one while it is there, so that a group shares one cache.

        A new key, and one whose server has gone, goes to the least busy server; so does a request without a key. Of
        equals it is the one that was chosen longest ago: a server that has just read a group's prefix has nothing to do
        for a moment, and its group all before it.

        Raises:
            EngineGoneError: none is in use; the message says what became of each.
        """
        home = self._homes.get(key)
        if home is not None and not home.problem and home is not avoid:
            self._homes.move_to_end(key)
            return home
        servers = [s for s in self.usable() if s is not avoid] or self.usable()
        if not servers:
            raise EngineGoneError(f"no inference server is left ({self.fates()}). Start the run again to go on")
        server = min(servers, key=lambda s: (s.in_flight, s.chosen, s.name))
        self._choices += 1
        server.chosen = self._choices
        if key:
            self._homes[key] = server
            while len(self._homes) > KEYS_KEPT:
                self._homes.popitem(last=False)
        return server

    def home(self, key: str) -> Server | None:
        """The server that a key's requests have gone to, where it is still in use."""
        found = self._homes.get(key)
        return None if found is None or found.problem else found

    def fates(self) -> str:
        """What became of the servers, in words."""
        return "; ".join(f"{s.name}: {s.problem or 'in use'}" for s in self.servers) or "none is there"

    async def enough(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Return once there are enough servers (True), or when patience has ended (whether there are).

        stop: whether to wait no longer, asked every now and then.
        """
        if not self.short or not self.patience:
            return not self.short
        if not self._told_short:
            self._told_short = True
            self.tell_short()
        deadline = time.monotonic() + self.patience
        while self.short and time.monotonic() < deadline and not stop():
            await asyncio.sleep(WAIT_SECONDS)
        self._told_short = self.short
        return not self.short

    @property
    def short(self) -> bool:
        """Whether fewer servers are left than requests want."""
        return len(self.usable()) < self.least

    def tell_short(self) -> None:
        """Say that requests wait for servers."""
        log.warning(
            "%d of at least %d inference servers are left (%s): requests wait up to %.0f s for others",
            len(self.usable()), self.least, self.fates(), self.patience,
        )  # fmt: skip

    async def dispatch(
        self,
        path: str,
        body: Callable[[Server], Json],
        key: str,
        admitted: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[Server, int, Json]:
        """POST a sampling request to the key's server; to another one, from the start, when that one is lost.

        body: makes the request for the server that it goes to. admitted: awaited before every try, so that a second one
        is not sent into a pause. Returns the server that answered, the version of its weights when it was asked, and
        its answer.

        Raises:
            RefusedError: the server refused the request.
            EngineGoneError: none is left, and none came within `patience`.
            ServerHungError: the server hangs, and `tells_hangs`.
            HangsServersError: more than `hangs_allowed` have hung at it in a row, or `BUSY` times as many in all.
            EngineError: all tries failed.
        """
        avoid: Server | None = None
        failures = hangs = in_a_row = 0
        answers = self.answers
        while True:
            enough = await self.enough()
            if admitted is not None:
                await admitted()
            if enough and not self.usable() and self.patience:
                continue  # the last one was lost while this request was held back
            server = self.choose(key, avoid)
            version = server.version
            if not server.in_flight and server is not avoid:  # what was lost with it just now it still owes
                server.owing = time.monotonic()
            server.in_flight += 1
            server.versions[version] += 1
            try:
                answer = await self._unless_hung(server, path, body(server), key)
                server.owing = time.monotonic()
                self.answers += 1
                return server, version, answer
            except (ServerLostError, ServerFailedError) as error:
                failures += 1
                if server.hangs:
                    hangs += 1
                    in_a_row, answers = in_a_row + 1 if self.answers == answers else 1, self.answers
                    told = f"an engine server hung at the same request, of task {key or '(without a name)'}"
                    if 0 < self.hangs_allowed < in_a_row:
                        told = f"{in_a_row} times in a row {told}, and none was answered between"
                        raise _hangs_servers(server, told) from error
                    if 0 < self.hangs_allowed < hangs / BUSY:
                        raise _hangs_servers(server, f"{hangs} times {told}") from error
                # An engine that died may answer errors for a while, until its server has noticed and ends.
                doubted = isinstance(error, ServerLostError) or failures >= self.limits.attempts
                if doubted and not await self.healthy(server):
                    server.discard(str(error))
                    await self._reason(server)
                elif failures >= self.limits.attempts:
                    raise EngineError(f"{failures} tries failed; the last: {error}") from error
                else:
                    avoid = server
                    await asyncio.sleep(min(self.limits.backoff * 2 ** (failures - 1), 5.0))
                self.redispatched += 1
            finally:
                server.in_flight -= 1
                server.versions[version] -= 1

    async def _unless_hung(self, server: Server, path: str, body: Json, key: str) -> Json:
        """The answer to a sampling request.

        Raises as `call`, and ServerLostError, or ServerHungError, once the server is found to hang.
        """
        try:
            async with asyncio.timeout(None) as limit:
                server.calls[limit] = PURPOSE.get() or key
                try:
                    return await self.call(server, "POST", path, body, self.limits.request)
                finally:
                    server.calls.pop(limit, None)
        except TimeoutError as error:  # `call` tells its own in other words
            kind = ServerHungError if self.tells_hangs else ServerLostError
            raise kind(f"{server.name}: {server.problem}") from error

    async def _reason(self, server: Server) -> None:
        """Wait a moment, where no server is left, for the end of its process: that says more than a lost connection."""
        first = server.problem
        deadline = time.monotonic() + NOTICE_SECONDS
        while not self.usable() and server.problem == first and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def healthy(self, server: Server) -> bool:
        """Whether the server's health check answers 200. Asked twice: one lost connection proves nothing."""
        for _ in range(2):
            if server.problem:
                return False
            try:
                await self.call(server, "GET", self.health_path, None, self.limits.health)
                return True
            except EngineError:
                continue
        return False

    async def call(self, server: Server, method: str, path: str, body: Json | None, seconds: float) -> Json:
        """One call to one server, sent once. Returns the JSON answer (empty for an answer that is no JSON object).

        A connection that was not made while this process did other things is tried anew, until `seconds` have passed
        in all: nothing was sent.

        Raises:
            ServerLostError, ServerFailedError, RefusedError: see there.
        """
        where = f"{server.name} ({server.url}) {path}"
        data = None if body is None else orjson.dumps(body)
        session, lag, kept = await self._session(server)
        began = time.monotonic()
        status, content, last = 0, b"", kept.begin()
        headers = JSON | LAST if last else JSON
        try:
            while not status:
                left = seconds - (time.monotonic() - began)
                total = max(left, 0.001) if math.isfinite(left) else None
                timeout = aiohttp.ClientTimeout(total=total, sock_connect=self.limits.connect)
                lagged = lag.seconds()
                try:
                    async with session.request(
                        method, server.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
                    ) as response:
                        status, content = response.status, await response.read()
                except aiohttp.ConnectionTimeoutError:
                    if left <= 0 or lag.seconds() - lagged <= LAGGED * self.limits.connect:
                        raise
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerLostError(f"{where}: no connection within {self.limits.connect:g} s") from error
        except TimeoutError as error:
            raise ServerLostError(f"{where} did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                # No fault of the server's; idle connections are kept, so there are as many as were busy at most.
                raise UserError(f"{where}: {os.strerror(error.errno)}: raise `ulimit -Hn`, then start again") from error
            raise ServerLostError(f"{where}: the connection failed ({type(error).__name__} {error})") from error
        finally:
            kept.end(last, lost=not status)
        if status >= 500 or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise ServerFailedError(f"{where} answered {status}: {_start(content)}")
        if status >= 300:
            raise RefusedError(f"{where} refused ({status}): {_start(content)}")
        try:
            answer = orjson.loads(content)
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    async def close(self) -> None:
        """Close the connections of this event loop, and of those that have ended."""
        loop = asyncio.get_running_loop()
        for other in [other for other in self._connections if other is loop or other.is_closed()]:
            await self._connections.pop(other).close()

    async def _session(self, server: Server) -> tuple[aiohttp.ClientSession, LoopLag, KeptConnections]:
        """This event loop's connections to a server, its lag, and which of them are kept."""
        loop = asyncio.get_running_loop()
        if (found := self._connections.get(loop)) is None:
            ended = [self._connections.pop(other) for other in list(self._connections) if other.is_closed()]
            found = self._connections[loop] = _Connections()
            for one in ended:
                await one.close()
        return found.session(server.idle), found.lag, found.kept[server.url]


class _Connections:
    """Those of one event loop, to which they belong, and its lag."""

    def __init__(self) -> None:
        self.lag = LoopLag()
        self.lag.start()
        self.kept: defaultdict[str, KeptConnections] = defaultdict(KeptConnections)
        self._sessions: dict[float, aiohttp.ClientSession] = {}

    def session(self, idle: float) -> aiohttp.ClientSession:
        """Connections to servers that close idle ones after so many seconds."""
        if idle not in self._sessions:
            self._sessions[idle] = open_session(idle)
        return self._sessions[idle]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def _hangs_servers(server: Server, hangs: str) -> HangsServersError:
    names = first_names(sorted(key or "(without a name)" for key in server.hung_at))
    return HangsServersError(
        f"{hangs}. At the last one, {server.name}, these tasks were under way: {names}. Look "
        "for the cause in the servers' logs; change servers.flags or the engine's version, leave the task out of the "
        "data, or raise servers.hang_seconds where such a turn only takes long. What was done is kept, and the same "
        "command goes on from it"
    )


def first_names(names: Sequence[str]) -> str:
    """The first `NAMED` of them, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _start(content: bytes) -> str:
    return content[:500].decode("utf-8", "replace")
