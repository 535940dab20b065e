"""What a sampler over servers does beside its work. Stand-ins: no real server makes the watch of the servers fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.rollout.background import BackgroundLoop
from trainer.rollout.server_sampler import ServedSampler


class BrokenFleet:
    """A fleet whose watch fails."""

    wants_folder = False

    async def ready(self) -> None:
        """At once."""

    async def watch(self) -> None:
        raise ValueError("the watch broke")


def test_a_run_whose_watch_of_the_servers_ends_is_told_so_at_the_next_groups(caplog: pytest.LogCaptureFixture) -> None:
    async def groups(*_: Any) -> list[str]:
        await asyncio.sleep(0)
        return []

    sampler, loop = ServedSampler.__new__(ServedSampler), BackgroundLoop()
    controller = SimpleNamespace(groups=groups)
    served = SimpleNamespace(fleet=BrokenFleet(), loop=loop, controller=controller, workers=None, engine=None)
    parts = {"served": served, "world": SimpleNamespace(size=1, broadcast=lambda x: x), "stop": lambda: False}
    parts |= {"config": SimpleNamespace(serving=SimpleNamespace(hang_seconds=0.0))}
    parts |= {"_make_publisher": lambda: None, "_publisher": None, "_started": False, "_failure": None}
    for name, value in (parts | {"_changed": asyncio.Event(), "_jobs": set()}).items():
        setattr(sampler, name, value)

    def several() -> None:
        for _ in range(3):
            sampler.groups([], cast("Any", None))

    try:
        with pytest.raises(ValueError, match="the watch broke"):
            several()
    finally:
        loop.close()
    assert "has ended" in caplog.text
