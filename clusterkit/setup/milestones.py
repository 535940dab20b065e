"""What hosts wait for on the head: its storage, its image, its Ray."""

from __future__ import annotations

import asyncio

from clusterkit.setup.model import StepFailedError


class Milestones:
    """Named points that one host reaches and others wait for. When that host fails, the others' waits fail."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._reached: set[str] = set()
        self._failure: StepFailedError | None = None
        self._changed = asyncio.Condition()

    async def reach(self, name: str) -> None:
        """End all waits for `name`."""
        async with self._changed:
            self._reached.add(name)
            self._changed.notify_all()

    async def fail(self, failure: StepFailedError) -> None:
        """Fail all waits for points that were not reached."""
        async with self._changed:
            self._failure = failure
            self._changed.notify_all()

    async def wait(self, name: str, step: str) -> None:
        """Wait until `name` is reached.

        Raises:
            StepFailedError: of `step`, since the owner has failed.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: name in self._reached or self._failure is not None)
        if name not in self._reached:
            assert self._failure is not None
            raise StepFailedError(
                step,
                f"the head node {self._owner} failed at {self._failure.step}: {self._failure.message}",
                fix=f"repair {self._owner} and run setup again; this host is ready up to here",
            )
