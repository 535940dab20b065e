"""Servers that hang while their health endpoint answers: they are found, told from slow ones, and given up."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from httpstub import Answer, Hang, HttpStub
from servedrig import PARAMS, FaultyServer, Rig, run_scenario

from evaluation.servers import KeptServers
from trainer.engines.dialects import make_dialect
from trainer.engines.hang_watch import until_it_hangs, watch_for_hangs
from trainer.engines.http import HangsServersError, Server
from trainer.errors import UserError

SECONDS = 0.2


class Silent(FaultyServer):
    """Answers requests for tokens only once it is `freed`. working: what it answers to whether it works."""

    def __init__(self, working: Answer) -> None:
        super().__init__()
        self.working, self.silent, self.asked = working, False, 0
        self.freed = asyncio.Event()

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        if path == "/health_generate":
            self.asked += 1
            return self.working
        if self.silent and path == "/generate":
            await self.freed.wait()
        return await super().__call__(method, path, body)


def scenario(tmp_path: Path, body: Callable[[Rig], Awaitable[None]]) -> None:
    run_scenario(lambda: Rig(tmp_path), body)


@asynccontextmanager
async def watched(rig: Rig) -> AsyncIterator[None]:
    job = asyncio.create_task(watch_for_hangs(rig.engine, SECONDS))
    yield
    job.cancel()
    with suppress(asyncio.CancelledError):
        await job


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_the_time_in_which_a_server_had_nothing_to_answer_is_not_counted(tmp_path: Path) -> None:
    """Nor that since a request which was given up, and was its last."""

    async def body(rig: Rig) -> None:
        fault = Silent((200, {}))
        server = await rig.add(fault)
        fault.silent = True
        given_up = asyncio.create_task(rig.engine.generate([5], PARAMS))
        await rig.started(0, 1)
        given_up.cancel()
        with suppress(asyncio.CancelledError):
            await given_up
        began = time.monotonic()
        job = asyncio.create_task(rig.engine.generate([6], PARAMS))
        await rig.started(0, 2)
        assert (server.in_flight, server.owing >= began) == (1, True)
        fault.freed.set()
        await job

    scenario(tmp_path, body)


@pytest.mark.parametrize("working", [Hang(), (503, {})], ids=["no answer", "it says no"])
def test_what_a_hanging_server_was_asked_is_sampled_by_another(working: Answer, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        fault = Silent(working)
        first = await rig.add(fault)
        fault.silent = True
        jobs = [asyncio.create_task(rig.engine.generate([5], PARAMS)) for _ in range(3)]
        await rig.started(0, 3)
        await rig.add()
        async with watched(rig):
            done = await asyncio.gather(*jobs)
        assert [len(one.token_ids) for one in done] == [6, 6, 6]
        assert (rig.stubs[1].count("/generate"), first.hangs, first.in_flight) == (4, True, 0)
        assert "none of its 3 requests, nor whether it works" in first.problem
        assert rig.stubs[0].count("/health") == 0  # which would have said that all is well

    scenario(tmp_path, body)


class HangsAt(Silent):
    """Hangs at the prompt [5], and answers others until it is asked whether it works."""

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        self.silent = body.get("input_ids") == [5]
        return await super().__call__(method, path, body)


def test_a_request_at_which_one_server_after_the_other_hangs_ends_the_run(tmp_path: Path) -> None:
    """They would be killed and started again for ever. A hang before another request was answered does not count."""

    async def body(rig: Rig) -> None:
        rig.pool.hangs_allowed, rig.pool.patience = 1, 60.0
        first = await rig.add(HangsAt(Hang()))
        jobs = [asyncio.create_task(rig.engine.generate([5], PARAMS, key=f"math-{n}")) for n in range(10)]
        async with watched(rig):
            await until(lambda: bool(first.problem))
            second = await rig.add(HangsAt(Hang()))
            await rig.started(1, 10)
            await rig.engine.generate([6], PARAMS)
            await until(lambda: bool(second.problem))
            assert not any(job.done() for job in jobs)
            await rig.add(HangsAt(Hang()))
            async with asyncio.timeout(10.0):
                errors = await asyncio.gather(*jobs, return_exceptions=True)
        assert {type(error) for error in errors} == {HangsServersError}
        told = str(errors[0])
        assert re.match(r"2 times in a row an engine server hung at the same request, of task math-\d, and none", told)
        assert "At the last one, s2, these tasks were under way: math-0, math-1, " in told
        assert "math-7 and 2 more. Look for the cause in the servers' logs" in told

    scenario(tmp_path, body)


def test_it_ends_the_run_after_more_servers_where_each_answers_others_before(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        rig.pool.hangs_allowed, rig.pool.patience = 1, 60.0
        bad = asyncio.create_task(rig.engine.generate([5], PARAMS, key="math-3"))
        async with watched(rig):
            for number in range(4):
                assert not bad.done()
                server = await rig.add(HangsAt(Hang()))
                await rig.started(number, 1)
                await rig.engine.generate([6], PARAMS)
                await until(lambda server=server: bool(server.problem))
            with pytest.raises(
                HangsServersError, match=r"^4 times an engine server hung at the same request, of task math-3\. "
            ):
                await bad

    scenario(tmp_path, body)


def test_several_may_say_that_a_server_hangs(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        first = await rig.add(fault := Silent(Hang()))
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        await rig.started(0, 1)
        await rig.add()
        while not job.done():
            first.hang("it hangs")
            await asyncio.sleep(0)
        assert (len((await job).token_ids), first.in_flight) == (6, 0)

    scenario(tmp_path, body)


@pytest.mark.parametrize("working", [(200, {}), (404, {})], ids=["it works", "it cannot be asked"])
def test_a_slow_server_is_asked_again_and_again_and_kept(working: Answer, tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        fault = Silent(working)
        server = await rig.add(fault)
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        async with watched(rig):
            await until(lambda: fault.asked == 3)
            fault.freed.set()
            assert len((await job).token_ids) == 6
        assert (server.problem, server.in_flight, rig.stubs[0].count("/generate")) == ("", 0, 2)

    scenario(tmp_path, body)


def test_a_server_that_answers_others_while_it_is_asked_does_not_hang(tmp_path: Path) -> None:
    """As one that compiles a kernel, and then goes on."""

    async def body(rig: Rig) -> None:
        fault = Silent((503, {}))
        server = await rig.add(fault)
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        async with watched(rig):
            await until(lambda: fault.asked == 1)
            fault.freed.set()
            await job
            fault.silent, asked = False, fault.asked
            await rig.engine.generate([6], PARAMS)
        assert (server.problem, fault.asked) == ("", asked)

    scenario(tmp_path, body)


def test_one_question_that_was_lost_does_not_make_a_server_hang(tmp_path: Path) -> None:
    """As after a while for which this process was stopped, when every question's time is over at once."""

    async def body(rig: Rig) -> None:
        fault = Silent(Hang())
        server = await rig.add(fault)
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        async with watched(rig):
            await until(lambda: fault.asked == 1)
            fault.working = (200, {})
            await until(lambda: fault.asked == 3 or bool(server.problem))
            assert server.problem == ""
            fault.freed.set()
            assert len((await job).token_ids) == 6

    scenario(tmp_path, body)


def test_a_server_is_at_something_until_it_has_said_that_it_works(tmp_path: Path) -> None:
    """Its memory is taken away once it is at nothing (`ColocatedPublisher.release`), and SGLang samples a token."""

    class Slow(Silent):
        def __init__(self) -> None:
            super().__init__((200, {}))
            self.may_say = asyncio.Event()

        async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
            answer = await super().__call__(method, path, body)
            if path == "/health_generate":
                await self.may_say.wait()
            return answer

    async def body(rig: Rig) -> None:
        server = await rig.add(fault := Slow())
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        asking = asyncio.create_task(watch_for_hangs(rig.engine, 8.0))
        await rig.started(0, 1)
        server.owing -= 30.0
        await until(lambda: fault.asked == 1)
        fault.freed.set()
        await job
        assert server.in_flight == 1
        fault.may_say.set()
        await until(lambda: not server.in_flight)
        asking.cancel()
        assert server.problem == ""

    scenario(tmp_path, body)


def test_nothing_is_asked_during_an_update(tmp_path: Path) -> None:
    async def body(rig: Rig) -> None:
        fault = Silent(Hang())
        server = await rig.add(fault)
        fault.silent = True
        job = asyncio.create_task(rig.engine.generate([5], PARAMS))
        await rig.started(0, 1)
        looks = 0

        class Updating:
            """The engine, as the watch sees it during an update; counts how often it looks."""

            pool, dialect = rig.pool, rig.engine.dialect

            @property
            def held(self) -> bool:
                nonlocal looks
                looks += 1
                return True

        watch = asyncio.create_task(watch_for_hangs(Updating(), SECONDS))  # type: ignore[arg-type]
        await until(lambda: looks == 8)  # each after a quarter of the limit
        watch.cancel()
        assert (fault.asked, server.problem) == (0, "")
        fault.freed.set()
        await job

    scenario(tmp_path, body)


def test_without_a_limit_there_is_no_watch(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(watch_for_hangs(Rig(tmp_path).engine, 0.0), 5.0))


def test_a_server_whose_requests_are_others_is_asked_whether_it_works() -> None:
    async def body() -> None:
        one = Silent((200, {}))
        async with HttpStub(one) as stub:
            found = asyncio.create_task(until_it_hangs(make_dialect("sglang"), Server("judge-0", stub.url), SECONDS))
            await until(lambda: one.asked >= 10)
            assert not found.done(), "it works"
            one.working = Hang()
            assert (await asyncio.wait_for(found, 60)).startswith("it hangs: for 0 s it has not answered whether")

    asyncio.run(body())


def test_too_many_open_files_of_this_process_are_no_sign_of_a_server_that_hangs() -> None:
    asked = 0

    class Full:
        health_path = "/health"

        async def check_working(self, *_: object) -> None:
            nonlocal asked
            asked += 1
            raise UserError("Too many open files")

    async def body() -> None:
        found = asyncio.create_task(until_it_hangs(Full(), Server("judge-0", ""), SECONDS / 10))  # type: ignore[arg-type]
        await until(lambda: asked >= 10 or found.done())
        assert not found.done()
        found.cancel()

    asyncio.run(body())


def test_an_evaluation_whose_watch_has_failed_ends_at_the_next_request(tmp_path: Path) -> None:
    async def fail() -> None:
        raise RuntimeError("it broke")

    async def body(rig: Rig) -> None:
        await rig.add(FaultyServer())
        servers = KeptServers("sglang", rig.engine, [], 0)
        await servers.generate([5], PARAMS)
        servers._watch = asyncio.create_task(fail())
        await asyncio.wait([servers._watch])
        with pytest.raises(RuntimeError, match="it broke"):
            await servers.generate([5], PARAMS)

    scenario(tmp_path, body)
