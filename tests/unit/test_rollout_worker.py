"""A controller process from within: the servers that rank 0 names, what it sends back, and where its warnings go.

It runs in a thread of the test here, which holds rank 0's end of the pipe.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.builders import byte_tokenizer, small_config
from trainer.paths import RunPaths
from trainer.rollout import samplers, worker
from trainer.rollout.controller import SamplingPlan
from trainer.rollout.samplers import SamplerParts, serve
from trainer.rollout.worker import WorkerJob, _Controller
from trainer.types import Group, Task, Trajectory

PLAN = SamplingPlan("train-1")


@pytest.fixture
def job(tmp_path: Path) -> WorkerJob:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    config = small_config(
        f"fileroot={tmp_path}", "servers.engine=vllm", "rollout.controllers=1", "agent.chunk_tokens=400"
    )
    return WorkerJob(config, tmp_path / "tokenizer", [0], 4096)


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Connection]]:
    ends = Pipe()
    yield ends
    for end in ends:
        end.close()


def made_by(job: WorkerJob, pipe: tuple[Connection, Connection], group: Any) -> tuple[Any, ...]:
    """What rank 0 is told of task 1, when this makes its group."""
    controller = _Controller(job, pipe[1])
    controller.controller.group = group  # type: ignore[method-assign]
    asyncio.run(controller._group(1, 0, PLAN, Task("task-1", "What?", ("It.",), "text")))
    found: tuple[Any, ...] = pickle.loads(pipe[0].recv_bytes())
    return found


def test_a_server_started_again_takes_the_place_of_the_one_of_its_name(
    job: WorkerJob, pipe: tuple[Connection, Connection]
) -> None:
    """Rank 0 may name the new one before it was seen here that the old one is gone."""

    async def main() -> None:
        controller = _Controller(job, pipe[1])
        controller._use([("server-0", "http://127.0.0.1:1", 3, 0, 5.0)], False)
        controller._use([("server-0", "http://127.0.0.1:2", 4, 1, 5.0)], False)
        await asyncio.gather(*controller._jobs)
        assert [(one.url, one.version) for one in controller.pool.usable()] == [("http://127.0.0.1:2", 4)]

    asyncio.run(main())


@pytest.mark.parametrize(("restarts", "allowed"), [(5, 5), (0, 1)])
def test_as_many_servers_may_hang_at_a_request_as_one_is_started_again(
    restarts: int, allowed: int, job: WorkerJob, pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at least: where none is started again others may have it."""
    monkeypatch.setattr(samplers, "collect_seldom", lambda: None)
    servers = ["servers.engine=vllm", f"servers.restarts={restarts}", "servers.hang_seconds=1000"]
    config = small_config(f"fileroot={job.config.fileroot}", *servers)
    parts: Any = dict.fromkeys(("world", "source", "course", "agent", "reward", "stop"))
    served = serve(SamplerParts(config=config, stop_ids={0}, window=0, **parts), job.model)
    served.loop.close()
    for pool in (served.engine.pool, _Controller(replace(job, config=config), pipe[1]).pool):
        assert (pool.hangs_allowed, pool.limits.request) == (allowed, 3000.0)


def test_requests_wait_while_the_run_has_too_few_servers(job: WorkerJob, pipe: tuple[Connection, Connection]) -> None:
    """Also where those of this controller are all there."""

    async def main() -> None:
        controller = _Controller(job, pipe[1])
        own = [("server-0", "http://127.0.0.1:1", 3, 0, 5.0)]
        controller._use(own, True)
        waiting = asyncio.ensure_future(controller.pool.enough())
        await asyncio.sleep(0)
        assert not waiting.done()
        controller._use([*own, ("server-2", "http://127.0.0.1:3", 3, 1, 5.0)], False)
        async with asyncio.timeout(10):
            assert await waiting

    asyncio.run(main())


def test_rank_0_is_told_which_servers_were_lost_and_which_hang(
    job: WorkerJob, pipe: tuple[Connection, Connection]
) -> None:
    async def main() -> None:
        controller = _Controller(job, pipe[1])
        controller._use([(f"server-{n}", f"http://127.0.0.1:{n + 1}", 3, n, 5.0) for n in range(3)], False)
        controller.pool.servers[0].discard("it died")
        controller.pool.servers[2].hang("it hangs")
        looking = asyncio.ensure_future(controller._look())
        told = [pickle.loads(await asyncio.to_thread(pipe[0].recv_bytes)) for _ in range(2)]
        looking.cancel()
        assert told == [("lost", "server-0", 0, "it died", False), ("lost", "server-2", 2, "it hangs", True)]

    asyncio.run(main())


class OddError(Exception):
    """Cannot be made again from its message alone, as pickle does."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one}{other}")


def test_an_error_that_pickle_cannot_make_again_arrives_as_its_text(
    job: WorkerJob, pipe: tuple[Connection, Connection]
) -> None:
    async def group(*_: Any) -> Group:
        raise OddError("the disk", " is gone")

    what, number, error, _ = made_by(job, pipe, group)

    assert (what, number, str(error)) == ("failed", 1, "OddError: the disk is gone")


def test_a_trajectory_that_cannot_be_sent_is_refused_in_words(
    job: WorkerJob, pipe: tuple[Connection, Connection]
) -> None:
    async def group(task: Task, *_: Any) -> Group:
        return Group(task, [Trajectory(task.id, [], reward=0.0, details={"call": lambda: None})])

    what, number, error, _ = made_by(job, pipe, group)

    assert (what, number) == ("failed", 1)
    assert "cannot be sent to rank 0" in str(error)
    assert "rollout.controllers=0" in str(error)
    assert len(str(error)) < 500


def test_why_a_trajectory_failed_stands_in_main_log(
    job: WorkerJob, pipe: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = RunPaths.of(job.config).logs
    logs.mkdir(parents=True)

    async def run(_: _Controller) -> None:
        logging.getLogger("trainer.rollout.controller").warning("trajectory train-1/0 failed: KeyError: 'x'")

    monkeypatch.setattr(_Controller, "run", run)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    try:
        worker.work(job, pipe[1])
    finally:
        logging.getLogger("trainer.rollout").handlers.clear()

    assert "WARNING: trajectory train-1/0 failed: KeyError: 'x'" in (logs / "main.log").read_text()


def test_a_controller_process_ends_with_rank_0(job: WorkerJob) -> None:
    here, there = Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker.work, args=(job, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(120)
        assert pickle.loads(here.recv_bytes()) == ("up",)
        here.send_bytes(pickle.dumps(("hold", 1)))
        assert [pickle.loads(here.recv_bytes()) for _ in range(2)] == [("held", 1), ("idle", 1)]
        here.close()
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
