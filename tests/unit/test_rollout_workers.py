"""Controllers in processes of their own, from rank 0's side: what it does when one dies, or says what it cannot read.

Processes are stand-ins here: the test holds their end of the pipe.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.builders import small_config
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.errors import RunError, UserError
from trainer.rollout import workers
from trainer.rollout.controller import SamplingPlan
from trainer.rollout.workers import STARTS, Workers, _Worker
from trainer.types import Group, Task

PLAN = SamplingPlan("train-1")


class Process:
    """A process that has ended once its end of the pipe is closed."""

    exitcode = -9

    def __init__(self, place: int, there: Connection) -> None:
        self.name, self.pid, self.there = f"controller-{place}", place, there

    def join(self, seconds: float) -> None:
        """It ends at once."""

    def is_alive(self) -> bool:
        return False

    def terminate(self) -> None:
        self.there.close()

    kill = terminate


class Stand(Workers):
    """Rank 0's side over stand-ins. processes: all that were started, in order."""

    def __init__(self, controllers: int) -> None:
        self.processes: list[Process] = []
        self.pool = ServerPool("/health")
        self.pool.add(Server("server-0", "http://127.0.0.1:1", 3))
        engine = ServedEngine(self.pool, make_dialect("sglang"), Path("model"), set(), 3)
        config = small_config("servers.engine=vllm", f"rollout.controllers={controllers}")
        super().__init__(config, Path("model"), set(), 100, engine, task)
        self.engine = engine

    def _start(self, place: int, before: tuple[float, ...] = ()) -> _Worker:
        here, there = Pipe()
        self.processes.append(Process(place, there))
        return _Worker(place, self.processes[-1], here, (*before, time.monotonic()), self._cannot_send)

    def said(self, process: int) -> list[tuple[Any, ...]]:
        """What a process was told since the last call."""
        there, found = self.processes[process].there, []
        next(one for one in self._workers if one.process is self.processes[process]).send("that is all")
        while (message := pickle.loads(there.recv_bytes())) != ("that is all",):
            found.append(message)
        return found

    async def ready(self, *numbers: int) -> None:
        """Have tasks made ready, and wait until the controllers were told."""
        self.make_ready(numbers)
        await until(lambda: not self._jobs)

    def says(self, process: int, *message: Any) -> None:
        self.processes[process].there.send_bytes(pickle.dumps(message))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def task(number: int) -> Task:
    return Task(f"task-{number}", "", ())


async def asked(stand: Stand, *numbers: int) -> list[asyncio.Future[Group]]:
    """Groups of these tasks, which controllers have been told of."""
    groups = [asyncio.ensure_future(stand.group(number, 0, PLAN, lambda: None)) for number in numbers]
    await until(lambda: sum(len(one.orders) for one in stand._workers) == len(numbers))
    return groups


def test_a_task_that_cannot_be_sent_ends_the_run_with_what_to_do() -> None:
    async def main() -> None:
        stand = Stand(1)
        stand._make_task = lambda number: Task(f"task-{number}", "", (), meta={"check": lambda: number})
        async with asyncio.timeout(10):
            with pytest.raises(UserError, match=r"tasks must be picklable; or set rollout\.controllers=0"):
                await stand.group(1, 0, PLAN, lambda: None)
        stand.close()

    asyncio.run(main())


def test_a_controller_that_died_too_often_while_it_had_nothing_to_do_ends_the_run() -> None:
    async def main() -> None:
        stand = Stand(1)
        stand.go_on()
        for started in range(1, STARTS + 1):
            stand.processes[-1].terminate()
            await until(lambda started=started: len(stand.processes) > started or stand._failure)
        async with asyncio.timeout(10):
            with pytest.raises(RunError, match="controller-0 ended with -9"):
                await stand.group(1, 0, PLAN, lambda: None)
        stand.close()

    asyncio.run(main())


def test_one_that_dies_now_and_then_is_started_again_for_as_long_as_the_run_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of ten days may lose a process to the memory killer more often than one that cannot begin."""
    monkeypatch.setattr(workers, "START_SECONDS", 0.0)

    async def main() -> None:
        stand = Stand(1)
        stand.go_on()
        for started in range(1, STARTS + 3):
            stand.processes[-1].terminate()
            await until(lambda started=started: len(stand.processes) > started)
        assert stand._failure is None
        stand.close()

    asyncio.run(main())


def test_a_task_that_ends_every_controller_ends_the_run_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them has lasted, and whichever had it."""
    monkeypatch.setattr(workers, "START_SECONDS", 0.0)

    async def main() -> None:
        stand = Stand(2)
        stand.go_on()
        (group,) = await asked(stand, 7)
        for started in range(1, STARTS + 1):
            next(one for one in stand._workers if one.orders).process.terminate()
            await until(lambda started=started: len(stand.processes) > started + 1 or stand._failure)
        async with asyncio.timeout(10):
            with pytest.raises(RunError, match="had task task-7, as 2 before it"):
                await group
        stand.close()

    asyncio.run(main())


def test_controllers_are_told_when_fewer_servers_are_left_than_the_run_requires(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        stand = Stand(2)
        stand.pool.least, stand.pool.patience = 2, 60.0
        stand.pool.add(Server("server-1", "http://127.0.0.1:2", 3))
        stand.go_on()
        assert [stand.said(place)[0][2] for place in (0, 1)] == [False, False]
        stand.pool.servers[1].discard("it died")
        stand.tell_servers()
        assert [[(len(servers), short) for _, servers, short in stand.said(place)] for place in (0, 1)] == [
            [(1, True)],
            [(1, True)],
        ]
        stand.pool.add(Server("server-2", "http://127.0.0.1:3", 3))
        stand.tell_servers()
        assert [stand.said(place)[0][2] for place in (0, 1)] == [False, False]
        stand.close()

    asyncio.run(main())
    assert "1 of at least 2 inference servers are left" in caplog.text


def test_a_server_that_a_controller_found_to_hang_hangs_for_the_run() -> None:
    async def main() -> None:
        stand = Stand(1)
        stand.pool.add(Server("server-1", "http://127.0.0.1:2", 3))
        stand.go_on()
        stand.says(0, "lost", "server-1", 1, "it hangs", True)
        stand.says(0, "lost", "server-0", 0, "it died", False)
        await until(lambda: not stand.pool.usable())
        found = [(one.problem, one.hangs) for one in sorted(stand.pool.servers, key=lambda one: one.name)]
        assert found == [("it died", False), ("it hangs", True)]
        stand.close()

    asyncio.run(main())


class OddError(Exception):
    """Cannot be made again from its message alone, as pickle does."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def test_what_cannot_be_read_ends_the_run_with_a_reason() -> None:
    async def main() -> None:
        stand = Stand(1)
        (group,) = await asked(stand, 1)
        stand.says(0, "failed", 1, OddError("a", "b"), stand.engine.stats)
        async with asyncio.timeout(10):
            with pytest.raises(UserError, match="controller-0: what it sent cannot be read"):
                await group
        stand.close()

    asyncio.run(main())


def test_a_task_made_ready_where_another_got_it_is_forgotten() -> None:
    """A document of a million characters, and its tokens, must not stay behind with every step."""

    async def main() -> None:
        stand = Stand(2)
        await stand.ready(1, 2, 3, 4)
        await stand.ready(2, 3, 4, 5)
        told = [[(what, number) for what, number, _ in stand.said(place)] for place in (0, 1)]
        assert [sorted(one) for one in told] == [
            [("ready", 1), ("ready", 3), ("ready", 5)],
            [("ready", 2), ("ready", 4)],
        ]
        groups = await asked(stand, 1, 3)
        assert stand.said(0) == [("task", 1, 0, PLAN, task(1)), ("forget", 3)]
        assert stand.said(1) == [("task", 3, 0, PLAN, task(3))]
        for place, number in enumerate((1, 3)):
            stand.says(place, "group", number, [], stand.engine.stats)
        assert [group.task.id for group in await asyncio.gather(*groups)] == ["task-1", "task-3"]
        stand.close()

    asyncio.run(main())


def test_a_controller_that_comes_up_during_an_update_waits_for_its_end() -> None:
    """Told of the old version, it would ask servers that get the new one, and take them for faulty."""

    async def main() -> None:
        stand = Stand(1)
        stand.go_on()
        said = stand.said(0)
        await stand.engine.hold()
        await stand.hold()
        stand.says(0, "up")
        await until(lambda: stand._workers[0].up)
        assert [what for what, *_ in said + stand.said(0)] == ["servers"]
        stand.engine.go_on(4)
        stand.go_on()
        assert [one for one in stand.said(0) if one[0] == "go"] == [("go", 4)]
        stand.close()

    asyncio.run(main())


def test_a_controller_that_is_up_late_begins_with_the_present_version() -> None:
    async def main() -> None:
        stand = Stand(1)
        stand.go_on()
        stand.says(0, "up")
        await until(lambda: stand._workers[0].up)
        assert [what for what, *_ in stand.said(0)] == ["servers", "go"]
        stand.close()

    asyncio.run(main())


def test_a_controller_that_does_not_hear_of_an_update_is_ended_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is stuck must not keep the run from its next step."""
    monkeypatch.setattr(workers, "HOLD_SECONDS", 0.05)

    async def main() -> None:
        stand = Stand(1)
        stand.says(0, "up")
        stand.go_on()
        await until(lambda: stand._workers[0].up)
        async with asyncio.timeout(10):
            await stand.hold()
        await until(lambda: len(stand.processes) > 1)
        stand.close()

    asyncio.run(main())


def test_an_update_does_not_wait_for_a_controller_that_was_started_in_the_middle_of_it() -> None:
    async def main() -> None:
        stand = Stand(1)
        stand.says(0, "up")
        stand.go_on()
        await until(lambda: stand._workers[0].up)
        await stand.engine.hold()
        stand.says(0, "held", 1)
        await stand.hold()
        stand.processes[0].terminate()
        await until(lambda: len(stand.processes) > 1)
        async with asyncio.timeout(10):
            await stand.idle()
        assert not stand.processes[1].there.closed
        stand.close()

    asyncio.run(main())


def test_a_controller_gets_tasks_by_the_number_of_its_servers() -> None:
    """Of three servers one controller has two: with as many groups on each the step ends soonest."""

    async def main() -> None:
        stand = Stand(2)
        for number in (1, 2):
            stand.pool.add(Server(f"server-{number}", f"http://127.0.0.1:{number + 1}", 3))
        stand.go_on()
        groups = await asked(stand, *range(6))
        assert [sum(what == "task" for what, *_ in stand.said(place)) for place in (0, 1)] == [4, 2]
        for group in groups:
            group.cancel()
        stand.close()

    asyncio.run(main())
