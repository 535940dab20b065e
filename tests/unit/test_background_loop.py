"""Coroutines that run on while another thread computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from trainer.rollout.background import BackgroundLoop


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


def test_a_coroutine_runs_in_another_thread(loop: BackgroundLoop) -> None:
    async def where() -> int:
        return threading.get_ident()

    assert loop.run(where()) != threading.get_ident()


def test_what_the_watcher_raises_cancels_the_coroutine(loop: BackgroundLoop) -> None:
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def give_up() -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        loop.watch(forever(), give_up, 0.01)
    assert cancelled.wait(10)


def test_a_timeout_of_the_coroutine_itself_is_handed_on(loop: BackgroundLoop) -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        loop.watch(late(), lambda: None, 5)


def test_closing_ends_what_still_runs() -> None:
    background = BackgroundLoop()
    ended = threading.Event()
    begun = threading.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    background.submit(forever())
    assert begun.wait(10)
    background.close()
    assert ended.is_set()
    background.close()  # twice is once
