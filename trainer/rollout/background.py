"""An event loop in a thread of its own: generation goes on there while the trainer computes here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines in one thread until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; what is returned is for threads, not for `await`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end from another thread."""
        return self.submit(coroutine).result()

    def watch(self, coroutine: Coroutine[Any, Any, T], tick: Callable[[], None], seconds: float) -> T:
        """As `run`, calling `tick` every so many seconds; what it raises cancels the coroutine and is raised here."""
        future = self.submit(coroutine)
        try:
            while True:
                try:
                    return future.result(seconds)
                except TimeoutError:
                    if future.done():  # the coroutine's own
                        raise
                    tick()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what still runs, wait for it, and end the thread."""
        if self._loop.is_closed():
            return
        self.submit(self._cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
