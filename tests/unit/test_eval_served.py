"""An evaluation on servers whose last one has died: it ends with the reason, and nothing is counted as an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from evalparts import chat_checkpoint, problems_config, problems_file
from httpstub import Answer, HttpStub

from evaluation.engines import Opened
from evaluation.grade import Grader
from evaluation.methods import make_reader
from evaluation.plan import make_rows
from evaluation.runner import Loaded, Runner
from trainer.engines.dialect import make_dialect
from trainer.engines.http import Limits, Server, ServerPool
from trainer.engines.served import ServedEngine
from trainer.errors import RunError
from trainer.train.model import load_tokenizer


def test_when_the_last_server_is_gone_the_evaluation_says_so_at_once(tmp_path: Path) -> None:
    model = chat_checkpoint(tmp_path / "model")
    config = problems_config(model, problems_file(tmp_path), tmp_path / "out")
    (row,) = make_rows(config, "checkpoint", "sglang")
    tasks = row.suite.load(len)
    reader = make_reader(config, row.method, load_tokenizer(model), 512)
    loaded = Loaded(row, reader, tasks, reader.prepare(tasks))
    row.record.begin({}, [{"id": task.id, "question": task.question, "answers": []} for task in tasks])

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
    keys = row.keys([task.id for task in tasks])
    assert row.record.missing(keys) == keys
