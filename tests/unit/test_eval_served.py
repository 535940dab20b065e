"""An evaluation whose servers die or hang: it goes on, or ends with the reason; nothing is counted as an answer.

How a real server comes back is shown in tests/integration/test_eval_real.py.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from evalparts import chat_checkpoint, problems_config, problems_file
from httpstub import Answer, Hang, HttpStub
from servedrig import FaultyServer

from evaluation.config import EvalConfig, ServerConfig
from evaluation.engines import Opened, open_engine
from evaluation.grade import Grader
from evaluation.methods import make_reader
from evaluation.plan import make_rows
from evaluation.runner import Loaded, Runner
from evaluation.servers import KeptServers
from trainer.engines.base import EngineGoneError
from trainer.engines.dialects import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerStartError
from trainer.engines.served import ServedEngine
from trainer.errors import RunError
from trainer.train.model import load_tokenizer
from trainer.types import Completion, SamplingParams


def problems(model: Path, config: EvalConfig) -> Loaded:
    """The only row of an evaluation, ready to be asked."""
    (row,) = make_rows(config, "checkpoint", "sglang")
    tasks = row.suite.load(len)
    reader = make_reader(config, row.method, load_tokenizer(model), 512, row.suite)
    row.record.begin({}, [{"id": task.id, "question": task.question, "answers": []} for task in tasks])
    return Loaded(row, reader, tasks, reader.prepare(tasks))


def test_when_the_last_server_is_gone_the_evaluation_says_so_at_once(tmp_path: Path) -> None:
    model = chat_checkpoint(tmp_path / "model")
    config = problems_config(model, problems_file(tmp_path), tmp_path / "out")
    loaded = problems(model, config)
    row = loaded.row

    async def run() -> None:
        async def refuse(*_: object) -> Answer:
            return 200, {}

        async with HttpStub(refuse) as stub:
            pool = ServerPool("/health", Limits(connect=1.0, health=1.0, attempts=2, backoff=0.01))
            pool.add(Server("only", stub.url))
            engine = ServedEngine(pool, make_dialect("sglang"), model, {0})
            stub.die()
            try:
                await Runner(config, Opened(engine, 4, {}), Grader(config, None), lambda: False).run([loaded])
            finally:
                await pool.close()

    with pytest.raises(RunError, match=r"no inference server is left \(only: .*the answers until now are written"):
        asyncio.run(run())
    keys = row.keys([task.id for task in loaded.tasks])
    assert row.record.missing(keys) == keys


class Ended:
    """Stands in for the process of a server: one that starts well and never again cannot be had from a real one.

    looks: how often it still runs when somebody looks, as a process does whose connections broke while it was killed.
    """

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks

    @property
    def running(self) -> bool:
        self.looks -= 1
        return self.looks >= 0

    def how_it_ended(self) -> str:
        return "was ended by SIGKILL"

    async def stop(self) -> None:
        """It has ended."""


class Running(Ended):
    """A process that hangs: it ends when it is killed."""

    running = True


@pytest.mark.parametrize("replaced", [False, True])
def test_a_server_that_comes_back_with_other_weights_is_not_asked(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_checkpoint(tmp_path / "model")

    async def run() -> bool:
        starts: list[str] = []

        async def launch(_: str, options: ServerOptions) -> tuple[Server, Ended]:
            starts.append(options.name)
            if len(starts) > 1 and replaced:
                (model / "model.safetensors").write_bytes(b"others")
            return Server(options.name, "http://127.0.0.1:9"), Ended()

        monkeypatch.setattr("evaluation.servers.launch", launch)
        engine = ServedEngine(ServerPool("/health"), make_dialect("sglang"), model, {0})

        async def join(server: Server) -> str:
            engine.pool.add(server)
            return "1.0"

        monkeypatch.setattr(engine, "join", join)
        servers = KeptServers("sglang", engine, [ServerOptions(model, tmp_path / "log")], restarts=1)
        await servers.start()
        engine.pool.servers[0].discard("it is lost")
        async with asyncio.timeout(60):
            while not engine.pool.usable() and servers._may_come_back():
                await asyncio.sleep(0.01)
        back = bool(engine.pool.usable())
        await servers.close()
        return back

    assert asyncio.run(run()) is not replaced


@pytest.mark.parametrize(("kind", "held"), [("sglang", 80.0), ("vllm", 0.0)])
def test_servers_are_started_with_the_time_for_which_prompts_wait(
    kind: str, held: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_checkpoint(tmp_path / "model")
    config = problems_config(model, problems_file(tmp_path), tmp_path / "out")
    config = config.model_copy(update={"server": ServerConfig(prefill_delay_ms=80.0)})
    started: list[ServerOptions] = []

    async def launch(_: object, options: ServerOptions) -> Any:
        started.append(options)
        raise ServerStartError("there is no GPU here")

    monkeypatch.setattr("evaluation.servers.launch", launch)
    monkeypatch.setattr("evaluation.engines.visible_gpus", lambda: 1)

    async def run() -> None:
        async with open_engine(config, kind, model, load_tokenizer(model), tmp_path, lambda: False):
            pass

    with pytest.raises(RunError, match="there is no GPU here"):
        asyncio.run(run())
    assert {options.prefill_delay_ms for options in started} == {held}


def test_a_server_that_does_not_start_again_is_given_up_after_so_many_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries: list[str] = []

    async def run() -> None:
        async def refuse(*_: object) -> Answer:
            return 200, {}

        async with HttpStub(refuse) as stub:

            async def launch(_: str, options: ServerOptions) -> tuple[Server, Ended]:
                tries.append(options.name)
                if len(tries) > 1:
                    raise ServerStartError("there is no memory for it")
                return Server(options.name, stub.url), Ended()

            monkeypatch.setattr("evaluation.servers.launch", launch)
            pool = ServerPool("/health", Limits(connect=1.0, health=1.0, attempts=2, backoff=0.01))
            engine = ServedEngine(pool, make_dialect("sglang"), tmp_path, {0})

            async def join(server: Server) -> str:
                pool.add(server)
                return "1.0"

            monkeypatch.setattr(engine, "join", join)
            servers = KeptServers("sglang", engine, [ServerOptions(tmp_path, tmp_path / "log")], restarts=2)
            assert await servers.start() == ["1.0"]
            stub.die()
            try:
                await servers.generate([1, 2], SamplingParams(4, 0.0, 0))
            finally:
                await servers.close()

    with pytest.raises(EngineGoneError, match=r"server-0: it did not start again: there is no memory for it"):
        asyncio.run(run())
    assert len(tries) == 3
    said = capsys.readouterr().err
    # Its broken connections were noticed before the end of its process, which says more.
    assert "server-0 is lost: it was ended by SIGKILL. It is started again (1 of 2)" in said
    assert "server-0 is lost: it did not start again: there is no memory for it. It is started again (2 of 2)" in said
    assert "It is given up" in said


def test_a_server_that_hangs_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its health endpoint answers all the time."""
    stopped: list[str] = []

    class Stopped(Running):
        async def stop(self) -> None:
            stopped.append("stopped")

    class Fault(FaultyServer):
        hung = False

        async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
            return Hang() if self.hung and path != "/health" else await super().__call__(method, path, body)

    async def run() -> Completion:
        async with HttpStub(fault := Fault()) as first, HttpStub(FaultyServer()) as second:
            urls = [first.url, second.url]

            async def launch(_: str, options: ServerOptions) -> tuple[Server, Ended]:
                return Server(options.name, urls.pop(0)), Stopped()

            monkeypatch.setattr("evaluation.servers.launch", launch)
            monkeypatch.setattr("evaluation.servers.END_SECONDS", 0.0)
            engine = ServedEngine(ServerPool("/health"), make_dialect("sglang"), tmp_path, {0})
            options = [ServerOptions(tmp_path, tmp_path / "log")]
            servers = KeptServers("sglang", engine, options, restarts=1, hang_seconds=0.2)
            await servers.start()
            fault.hung = True
            try:
                async with asyncio.timeout(60):
                    done = await servers.generate([1, 2], SamplingParams(4, 0.0, 0))
                assert stopped == ["stopped"]
                return done
            finally:
                await servers.close()

    assert len(asyncio.run(run()).token_ids) == 4
    assert "server-0 is lost: it hangs: for " in capsys.readouterr().err


class HangsAt(FaultyServer):
    """Hangs, with all that it has, from the moment on at which it gets one of these prompts."""

    def __init__(self, prompts: list[list[int]]) -> None:
        super().__init__()
        self.prompts, self.hung = prompts, False

    async def __call__(self, method: str, path: str, body: dict[str, Any]) -> Answer:
        self.hung = self.hung or body.get("input_ids") in self.prompts
        return Hang() if self.hung and path != "/health" else await super().__call__(method, path, body)


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_question_at_which_every_server_hangs_is_named_and_left_out(
    restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both answers to it. What was asked beside it is answered after the second hang; or all are named."""
    model = chat_checkpoint(tmp_path / "model")
    config = problems_config(model, problems_file(tmp_path), tmp_path / "out", n_sampling=1)
    loaded = problems(model, config)
    prompts = [one.ids for one in loaded.prepared]
    hang_at = [prompts, prompts, prompts[1:2], []]

    async def run() -> None:
        async with AsyncExitStack() as stack:

            async def launch(_: str, options: ServerOptions) -> tuple[Server, Ended]:
                stub = await stack.enter_async_context(HttpStub(HangsAt(hang_at.pop(0))))
                return Server(options.name, stub.url), Running()

            monkeypatch.setattr("evaluation.servers.launch", launch)
            monkeypatch.setattr("evaluation.servers.END_SECONDS", 0.0)
            engine = ServedEngine(ServerPool("/health"), make_dialect("sglang"), model, {0})
            options = [ServerOptions(model, tmp_path / "log")]
            servers = KeptServers("sglang", engine, options, restarts, hang_seconds=0.2)
            await servers.start()
            try:
                async with asyncio.timeout(60):
                    runner = Runner(config, Opened(servers, 8, {}), Grader(config, None), lambda: False)
                    await runner.run([loaded])
            finally:
                await servers.close()

    named = "these questions were under way: 1 of sums (2 times), 2 of sums (2 times), 3 of sums (2 times)"
    if restarts == 1:
        with pytest.raises(RunError, match=re.escape(named)):
            asyncio.run(run())
        return
    asyncio.run(run())
    said = capsys.readouterr().err
    assert f"{named}. It is started again (2 of 3)" in said
    assert said.count("2 of sums: this question is left out as failed") == 1
    failed = {key: entry["error"] for key, entry in loaded.row.record.samples.entries.items() if entry.get("error")}
    assert set(failed) == {("2", "greedy"), ("2", "0")}
    assert len(loaded.row.record.samples.entries) == 6
    assert all("3 times an engine server hung at the same request. Look for" in error for error in failed.values())
