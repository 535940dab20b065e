"""Requests to servers that die, hang, fail or leave. The servers are real sockets that stand for faults."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tests.httpstub import Answer, Drop, Hang, HttpStub
from trainer import connections
from trainer.connections import LONG_IDLE_S, KeptConnections, open_session
from trainer.engines.base import EngineError, EngineGoneError
from trainer.engines.http import Limits, RefusedError, Server, ServerLostError, ServerPool
from trainer.errors import UserError

FAST = Limits(connect=1.0, request=5.0, control=1.0, health=0.3, attempts=3, backoff=0.01)


async def well(method: str, path: str, body: dict[str, Any]) -> Answer:
    return 200, {"ok": True}


def answers(*first: Answer, health: Answer = (200, {})) -> Any:
    """A handler that gives these answers to sampling requests, one each, and works from then on."""
    left = list(first)

    async def handler(method: str, path: str, body: dict[str, Any]) -> Answer:
        if path == "/health":
            return health
        return left.pop(0) if left else (200, {"ok": True})

    return handler


async def pool_of(stack: AsyncExitStack, *handlers: Any, limits: Limits = FAST) -> tuple[ServerPool, list[HttpStub]]:
    stubs = [await stack.enter_async_context(HttpStub(handler)) for handler in handlers]
    pool = ServerPool("/health", limits)
    for number, stub in enumerate(stubs):
        pool.add(Server(f"s{number}", stub.url))
    stack.push_async_callback(pool.close)
    return pool, stubs


async def ask(pool: ServerPool, key: str = "group") -> str:
    server, _, answer = await pool.dispatch("/generate", lambda _: {}, key)
    assert answer == {"ok": True}
    return server.name


def test_a_group_stays_on_one_server_and_moves_only_with_it() -> None:
    pool = ServerPool("/health")
    servers = [Server(f"s{n}", "") for n in range(4)]
    for server in servers:
        pool.add(server)
    keys = [f"task-{n}" for n in range(400)]
    before = {key: pool.choose(key).name for key in keys}
    assert set(Counter(before.values()).values()) == {100}  # also while none has a request under way
    servers[2].discard("gone")
    after = {key: pool.choose(key).name for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "s2")
    pool.add(Server("s4", ""))
    joined = {key: pool.choose(key).name for key in keys}
    assert all(joined[key] in (after[key], "s4") for key in keys)


def test_without_a_key_the_least_busy_server_is_asked() -> None:
    pool = ServerPool("/health")
    pool.add(Server("a", "", in_flight=3))
    pool.add(Server("b", "", in_flight=1))
    assert pool.choose("").name == "b"


def test_a_server_that_dies_in_the_middle_hands_its_requests_to_another() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, answers(*[Hang()] * 20), answers(*[Hang()] * 20))
            key = next(k for k in map(str, range(99)) if pool.choose(k).name == "s0")
            jobs = [asyncio.create_task(ask(pool, key)) for _ in range(20)]
            while stubs[0].count("/generate") < 20:
                await asyncio.sleep(0.01)
            stubs[1].handler = well
            stubs[0].die()
            assert await asyncio.gather(*jobs) == ["s1"] * 20
            assert [s.name for s in pool.usable()] == ["s1"]
            assert pool.redispatched == 20

    asyncio.run(scenario())


def test_an_answer_cut_short_by_a_server_that_is_well_is_asked_for_again() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, answers(Drop()))
            assert await ask(pool) == "s0"
            assert stubs[0].count("/generate") == 2
            assert pool.usable()

    asyncio.run(scenario())


def test_a_server_that_hangs_is_given_up() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            hung = answers(Hang(), health=Hang())
            pool, _ = await pool_of(stack, hung, well, limits=Limits(request=0.3, health=0.2))
            key = next(k for k in map(str, range(99)) if pool.choose(k).name == "s0")
            assert await ask(pool, key) == "s1"
            assert "did not answer within 0.3 s" in pool.servers[0].problem

    asyncio.run(scenario())


def test_a_server_whose_engine_is_dead_is_given_up_although_it_answers() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            dead = answers(*[(500, {"detail": "the engine is dead"})] * 9, health=(503, {}))
            pool, _ = await pool_of(stack, dead)
            with pytest.raises(EngineGoneError, match=r"no inference server is left .*the engine is dead"):
                await ask(pool)
            assert pool.usable() == []

    asyncio.run(scenario())


def test_a_request_waits_until_a_server_that_hangs_is_given_up_and_without_end_where_none_is() -> None:
    assert [Limits.beside(seconds).request for seconds in (10.0, 600.0, 1200.0)] == [1800.0, 1800.0, 3600.0]

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, _ = await pool_of(stack, well, limits=Limits.beside(0.0))
            assert await ask(pool) == "s0"

    asyncio.run(scenario())


def test_errors_of_a_server_are_tried_again_elsewhere_and_then_told() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            error = (500, {"detail": "scheduler is sad"})
            pool, stubs = await pool_of(stack, answers(*[error] * 9), well)
            key = next(k for k in map(str, range(99)) if pool.choose(k).name == "s0")
            assert await ask(pool, key) == "s1"
            await pool.remove(pool.servers[1])
            with pytest.raises(EngineError, match=r"3 tries failed.*s0 .*500.*scheduler is sad"):
                await ask(pool, key)
            assert stubs[0].count("/generate") == 4

    asyncio.run(scenario())


def test_a_refused_request_is_not_repeated() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, answers((400, {"error": "too long"})), well)
            key = next(k for k in map(str, range(99)) if pool.choose(k).name == "s0")
            with pytest.raises(RefusedError, match="too long"):
                await ask(pool, key)
            assert stubs[0].count("/generate") == 1
            assert stubs[1].count("/generate") == 0

    asyncio.run(scenario())


def test_control_calls_are_sent_once() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, answers(Drop(), (503, {})))
            for _ in range(2):
                with pytest.raises(EngineError):
                    await pool.call(pool.servers[0], "POST", "/update", {}, 1.0)
            assert stubs[0].count("/update") == 2

    asyncio.run(scenario())


def test_the_last_server_lost_says_what_became_of_each() -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, well, well)
            pool.servers[0].discard("it was ended by SIGKILL")
            stubs[1].die()
            with pytest.raises(
                EngineError, match=r"no inference server is left \(s0: it was ended by SIGKILL; s1: .*connection"
            ):
                await ask(pool)

    asyncio.run(scenario())


def test_a_server_that_leaves_answers_what_it_was_asked() -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def slow(method: str, path: str, body: dict[str, Any]) -> Answer:
            await go.wait()
            return 200, {"ok": True}

        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, slow)
            job = asyncio.create_task(ask(pool))
            while not stubs[0].seen:
                await asyncio.sleep(0.01)
            leaving = asyncio.create_task(pool.remove(pool.servers[0]))
            await asyncio.sleep(0)
            pool.add(Server("s1", (await stack.enter_async_context(HttpStub(well))).url))
            assert await ask(pool) == "s1"
            assert not leaving.done()
            go.set()
            assert await job == "s0"
            await leaving
            assert [s.name for s in pool.servers] == ["s1"]

    asyncio.run(scenario())


def test_one_pool_serves_one_event_loop_after_another() -> None:
    pool = ServerPool("/health", FAST)

    async def scenario() -> None:
        async with HttpStub(well) as stub:
            pool.servers = [Server("s0", stub.url)]
            assert await ask(pool) == "s0"

    asyncio.run(scenario())
    asyncio.run(scenario())
    asyncio.run(pool.close())


def test_a_connection_that_this_process_had_no_time_for_is_made_anew() -> None:
    """A step's thousands of prompts are made at once: meanwhile no connection is finished, and none has failed."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            pool, stubs = await pool_of(stack, well, limits=replace(FAST, connect=0.3))
            job = asyncio.create_task(ask(pool))
            for _ in range(8):
                busy = time.monotonic() + 0.35
                while time.monotonic() < busy:  # every turn of the loop takes longer than a connection may
                    pass
                await asyncio.sleep(0)
            assert await job == "s0"
            assert not pool.servers[0].problem
            assert stubs[0].count("/generate") == 1

    asyncio.run(scenario())


def test_a_host_that_vanishes_is_noticed_though_nothing_is_sent_to_it() -> None:
    """An answer may take half an hour, and a host without power closes no connection: the kernel has to ask."""

    async def long(method: str, path: str, body: dict[str, Any]) -> Answer:
        return 200, "x" * 10_000_000  # so that the connection is still there

    async def scenario() -> dict[int, int]:
        session = open_session()
        async with HttpStub(long) as stub, session.get(stub.url) as response:
            assert response.connection is not None
            assert response.connection.transport is not None
            made = response.connection.transport.get_extra_info("socket")
            names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            found = {name: made.getsockopt(socket.IPPROTO_TCP, name) for name in names}
            found[0] = made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        await session.close()
        return found

    found = asyncio.run(scenario())
    idle, every, times = (found[name] for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
    assert found[0]
    assert idle + every * times <= 60


@pytest.mark.parametrize(("idle", "connections"), [(LONG_IDLE_S, 1), (0.0, 3)], ids=["a run's own", "closes at once"])
def test_connections_are_used_again_while_their_server_keeps_them(idle: float, connections: int) -> None:
    """The requests of a step's beginning would connect anew, all at once, after the ranks have learned."""

    async def scenario() -> int:
        async with AsyncExitStack() as stack:
            pool, (stub,) = await pool_of(stack, well)
            pool.servers[0].idle = idle
            for _ in range(3):
                await ask(pool)
            return stub.connections

    assert asyncio.run(scenario()) == connections


def test_connections_that_a_server_needed_once_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation needs many at once; the steps after it keep what steps need, and connect no more."""
    together = asyncio.Barrier(1)

    async def all_at_once(method: str, path: str, body: dict[str, Any]) -> Answer:
        await together.wait()
        return 200, {"ok": True}

    async def scenario() -> list[tuple[int, int]]:
        nonlocal together
        found = []
        async with AsyncExitStack() as stack:
            pool, (stub,) = await pool_of(stack, all_at_once)
            pool.servers[0].idle = LONG_IDLE_S
            for requests, pause in ((8, 0.0), (3, 1.0), (3, 0.0), (3, 1.0), (3, 0.0), (3, 0.0)):
                now[0] += 2 * pause * connections.NEED_S
                for _ in range(2):
                    together = asyncio.Barrier(requests)
                    await asyncio.gather(*(ask(pool) for _ in range(requests)))
                found.append((stub.connections, stub.open))
        return found

    now = [0.0]
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    eight, after, same, fewer, fewest, last = asyncio.run(scenario())
    assert eight == after == same == (8, 8), "what was needed a while ago is kept"
    assert fewer[1] < 8
    assert fewest[0] == last[0] == 8, "nothing connects anew"
    assert last[1] == 3


def test_as_many_requests_may_be_under_way_as_the_system_allows() -> None:
    """Containers and shells begin with 1,024 files; AReaL's steps have 8,192 requests at once."""
    code = (
        "import asyncio, resource\n"
        "from trainer.connections import open_session\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "async def main():\n"
        "    await open_session().close()\n"
        "asyncio.run(main())\n"
        "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
        "assert soft == min(hard, 1 << 16) or hard == resource.RLIM_INFINITY, (soft, hard)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_process_holds_is_not_looked_through_again_for_every_few_answers() -> None:
    """Each sampled token is a small list: all objects were looked through after some dozens of answers."""
    code = (
        "import gc, orjson\n"
        "from trainer.connections import collect_seldom\n"
        "held = [[number] for number in range(300_000)]\n"
        "collect_seldom()\n"
        "looks = []\n"
        "gc.callbacks.append(lambda phase, told: looks.append(told['generation']))\n"
        "answer = orjson.dumps([[-1.5, number, None] for number in range(5_000)])\n"
        "for _ in range(100):\n"
        "    pairs = orjson.loads(answer)\n"
        "assert 2 not in looks, looks\n"
        "assert gc.get_freeze_count() > 300_000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Unreachable:
    """A session whose connections are never made."""

    tries = 0

    def __init__(self, error: Exception) -> None:
        self.error = error

    def request(self, *_: Any, **__: Any) -> Any:
        self.tries += 1
        return self

    async def __aenter__(self) -> None:
        await asyncio.sleep(0)
        raise self.error

    async def __aexit__(self, *_: object) -> None:
        """Nothing was opened."""


class EverLater:
    """The lag of a loop that is always kept from its work."""

    total = 0.0

    def seconds(self) -> float:
        self.total += 1.0
        return self.total


async def call(session: Unreachable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call to a server over such a session."""
    pool, lag = ServerPool("/health", FAST), EverLater()

    async def sessions(_server: Server) -> Any:
        return session, lag, KeptConnections()

    monkeypatch.setattr(pool, "_session", sessions)
    async with asyncio.timeout(10):
        await pool.call(Server("a", "http://a"), "POST", "/generate", {}, 0.2)


def test_a_process_without_files_left_blames_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's answer is faked: the tests' own process needs its files."""
    with pytest.raises(UserError, match="Too many open files: raise `ulimit -Hn`"):
        asyncio.run(call(Unreachable(OSError(errno.EMFILE, "Too many open files")), monkeypatch))


def test_a_busy_process_does_not_try_a_server_that_vanished_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests would never go to another server."""
    session = Unreachable(aiohttp.ConnectionTimeoutError())

    with pytest.raises(ServerLostError, match="no connection within"):
        asyncio.run(call(session, monkeypatch))
    assert session.tries > 1, "a process that had no time tries again"
