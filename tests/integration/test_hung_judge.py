"""A judge whose engine is stopped, though its port is open, is killed and started again by its host."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from vllmserver import random_qwen2, vllm_options, vllm_python

from trainer.serving import registry
from trainer.serving.host import ServerHost

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_judge_that_hangs_is_started_again(tmp_path: Path) -> None:
    vllm_python()
    model, folder = tmp_path / "model", tmp_path / "judges"
    random_qwen2(1).save_pretrained(model)
    folder.mkdir()
    options = replace(vllm_options(model, tmp_path / "log"), name="judge-0", hang_seconds=8.0)
    host = ServerHost("vllm", options, folder, 1)

    async def main() -> None:
        job = asyncio.create_task(host.run())

        async def answers(starts: int) -> None:
            while not any(one.state == "ready" and one.starts == starts for one in registry.read(folder)):
                assert not job.done(), "it was given up"
                await asyncio.sleep(0.1)

        await answers(1)
        (core,) = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in one.name()]
        core.suspend()
        await answers(2)
        assert not core.is_running()
        host.stop.set()
        assert await job == 0

    asyncio.run(main())
