"""What a sampler over servers does beside its work. Stand-ins: no real server makes the watch of the servers fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.engines.served_stats import EVALUATES, ServedStats
from trainer.errors import UserError
from trainer.rollout import server_sampler
from trainer.rollout.background import BackgroundLoop
from trainer.rollout.controller import RolloutInterruptedError
from trainer.rollout.server_sampler import ServedSampler


class BrokenFleet:
    """A fleet whose watch fails."""

    wants_folder = False

    async def ready(self) -> None:
        """At once."""

    async def watch(self) -> None:
        raise ValueError("the watch broke")


class WatchedFleet(BrokenFleet):
    """A fleet of which nothing is heard."""

    async def watch(self) -> None:
        await asyncio.Event().wait()


def sampler_of(groups: Callable[..., Any], fleet: BrokenFleet, loop: BackgroundLoop, stop: list[bool]) -> ServedSampler:
    """A sampler of one rank. groups: in place of the controller's. stop: has something once the run is to stop."""
    sampler = ServedSampler.__new__(ServedSampler)
    served = SimpleNamespace(
        fleet=fleet,
        loop=loop,
        controller=SimpleNamespace(groups=groups),
        workers=None,
        engine=SimpleNamespace(stats=ServedStats()),
    )
    parts = {"served": served, "world": SimpleNamespace(size=1, broadcast=lambda x: x), "stop": lambda: bool(stop)}
    parts |= {"config": SimpleNamespace(serving=SimpleNamespace(hang_seconds=0.0), refills=False)}
    parts |= {"_staleness": [], "_dropped": 0, "_score_wait": None, "_reported": ServedStats()}
    parts |= {"_make_publisher": lambda: None, "_publisher": None, "_started": False, "_failure": None}
    for name, value in (parts | {"_changed": asyncio.Event(), "_jobs": set()}).items():
        setattr(sampler, name, value)
    return sampler


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    found = BackgroundLoop()
    yield found
    found.close()


def test_a_run_whose_watch_of_the_servers_ends_is_told_so_at_the_next_groups(
    loop: BackgroundLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def groups(*_: Any) -> list[str]:
        await asyncio.sleep(0)
        return []

    sampler = sampler_of(groups, BrokenFleet(), loop, [])

    def several() -> None:
        for _ in range(3):
            sampler.groups([], cast("Any", None))

    with pytest.raises(ValueError, match="the watch broke"):
        several()
    assert "has ended" in caplog.text


@pytest.mark.parametrize("several", [False, True])
def test_the_prompts_of_an_evaluation_are_not_counted_with_those_of_the_step_after_it(
    loop: BackgroundLoop, several: bool
) -> None:
    async def groups(*_: Any) -> list[str]:
        assert EVALUATES.get()
        stats.prompt_tokens += 1000
        stats.evaluated_prompt_tokens += 1000
        return []

    sampler = sampler_of(groups, WatchedFleet(), loop, [])
    assert sampler.served is not None
    stats = sampler.served.engine.stats

    if several:
        assert len(list(sampler.each(cast("Any", [(["one"], None), (["other"], None)])))) == 2
    else:
        sampler.groups([], cast("Any", None))
    assert sampler.stats() == {}
    stats.prompt_tokens += 10
    stats.cached_tokens += 5

    assert sampler.stats() == {"cached_share": 0.5}


class Asking:
    """In place of a controller: lists of tasks are under way until they are let go; ["fails"] fails then."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.ended: list[Any] = []
        self.held: dict[Any, asyncio.Event] = {}

    async def groups(self, tasks: list[str], _plan: Any) -> list[str]:
        self.begun.append(tasks)
        try:
            await self.held.setdefault(tasks[0], asyncio.Event()).wait()
        finally:
            self.ended.append(tasks)
        if tasks == ["fails"]:
            raise UserError("no answer")
        return [f"group of {task}" for task in tasks]

    def let_go(self, loop: BackgroundLoop, *names: str) -> None:
        async def set_all() -> None:
            for name in names:
                self.held.setdefault(name, asyncio.Event()).set()

        loop.run(set_all())


def test_several_lists_begin_at_once_and_come_in_their_order(loop: BackgroundLoop) -> None:
    asking = Asking()
    asking.let_go(loop, "short", "middle")
    lists = [(["short"], None), (["middle", "other"], None), (["long"], None)]
    found = sampler_of(asking.groups, WatchedFleet(), loop, []).each(cast("Any", lists))

    assert next(found)[0] == ["group of short"]
    assert asking.begun == [tasks for tasks, _ in lists]
    assert next(found)[0] == ["group of middle", "group of other"]
    assert ["long"] not in asking.ended
    asking.let_go(loop, "long")
    ((groups, seconds),) = found
    assert groups == ["group of long"]
    assert seconds >= 0.0


def test_several_lists_do_not_go_on_without_the_watch_of_the_servers(loop: BackgroundLoop) -> None:
    asking = Asking()
    asking.let_go(loop, "a", "watch")

    class Ending(BrokenFleet):
        async def watch(self) -> None:
            await asking.groups(["watch"], None)
            await asking.groups(["until"], None)
            await super().watch()

    sampler = sampler_of(asking.groups, Ending(), loop, [])
    found = sampler.each(cast("Any", [(["a"], None), (["b"], None)]))
    next(found)
    asking.let_go(loop, "until")
    while sampler._failure is None:
        time.sleep(0.01)
    asking.let_go(loop, "b")

    with pytest.raises(ValueError, match="the watch broke"):
        next(found)


def test_where_one_of_several_lists_fails_the_others_are_given_up(loop: BackgroundLoop) -> None:
    asking = Asking()
    asking.let_go(loop, "fails")
    sampler = sampler_of(asking.groups, WatchedFleet(), loop, [])

    with pytest.raises(UserError, match="no answer"):
        list(sampler.each(cast("Any", [(["fails"], None), (["a"], None), (["b"], None)])))
    assert sorted(map(str, asking.ended)) == ["['a']", "['b']", "['fails']"]


def test_a_run_that_is_to_stop_gives_several_lists_up(loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sampler, "TICK_SECONDS", 0.01)
    asking, stop = Asking(), list[bool]()
    asking.let_go(loop, "a")
    found = sampler_of(asking.groups, WatchedFleet(), loop, stop).each(cast("Any", [(["a"], None), (["b"], None)]))
    next(found)
    stop.append(True)

    with pytest.raises(RolloutInterruptedError):
        next(found)
    assert asking.ended == [["a"], ["b"]]
