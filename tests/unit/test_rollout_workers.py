"""Controllers in processes of their own, from rank 0's side: what it does when one dies, or says what it cannot read.

Processes are stand-ins here: the test holds their end of the pipe.
"""

from __future__ import annotations

import asyncio
import pickle
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
        super().__init__(
            small_config("servers.engine=vllm", f"rollout.controllers={controllers}"), Path("model"), set(), 100, engine
        )
        self.engine = engine

    def _start(self, place: int, starts: int = 1) -> _Worker:
        here, there = Pipe()
        self.processes.append(Process(place, there))
        return _Worker(place, self.processes[-1], here, starts=starts)

    def said(self, process: int) -> list[tuple[Any, ...]]:
        """What a process was told since the last call."""
        there, found = self.processes[process].there, []
        while there.poll():
            found.append(pickle.loads(there.recv_bytes()))
        return found

    def says(self, process: int, *message: Any) -> None:
        self.processes[process].there.send_bytes(pickle.dumps(message))


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def made(number: int) -> Group:
    return Group(Task(f"task-{number}", "", ()), [])


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


class OddError(Exception):
    """Cannot be made again from its message alone, as pickle does."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def test_what_cannot_be_read_ends_the_run_with_a_reason() -> None:
    async def main() -> None:
        stand = Stand(1)
        asked = asyncio.ensure_future(stand.group(1, 0, PLAN, lambda: None))
        await asyncio.sleep(0)
        stand.says(0, "failed", 1, OddError("a", "b"), stand.engine.stats)
        async with asyncio.timeout(10):
            with pytest.raises(UserError, match="controller-0: what it sent cannot be read"):
                await asked
        stand.close()

    asyncio.run(main())


def test_a_task_made_ready_where_another_got_it_is_forgotten() -> None:
    """A document of a million characters, and its tokens, must not stay behind with every step."""

    async def main() -> None:
        stand = Stand(2)
        stand.make_ready([1, 2, 3, 4])
        stand.make_ready([2, 3, 4, 5])
        assert [stand.said(place) for place in (0, 1)] == [
            [("ready", [1, 3]), ("ready", [5])],
            [("ready", [2, 4]), ("ready", [])],
        ]
        groups = [asyncio.ensure_future(stand.group(number, 0, PLAN, lambda: None)) for number in (1, 3)]
        await asyncio.sleep(0)
        assert stand.said(0) == [("task", 1, 0, PLAN), ("forget", 3)]
        assert stand.said(1) == [("task", 3, 0, PLAN)]
        for place, number in enumerate((1, 3)):
            stand.says(place, "group", number, made(number), stand.engine.stats)
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
        groups = [asyncio.ensure_future(stand.group(number, 0, PLAN, lambda: None)) for number in range(6)]
        await asyncio.sleep(0)
        assert [sum(what == "task" for what, *_ in stand.said(place)) for place in (0, 1)] == [4, 2]
        for group in groups:
            group.cancel()
        stand.close()

    asyncio.run(main())
