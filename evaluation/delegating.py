"""An engine around another one: everything but `generate` is the inner one's."""

from __future__ import annotations

from trainer.engines.base import Engine
from trainer.types import Completion, SamplingParams


class Delegating:
    """Engine protocol; subclasses change `generate`."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    @property
    def version(self) -> int:
        """See `Engine`."""
        return self.inner.version

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """See `Engine`."""
        return await self.inner.generate(prompt_ids, params, key=key)

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """See `Engine`."""
        self.inner.prefetch(prefix_ids, key=key)

    async def pause(self) -> None:
        """See `Engine`."""
        await self.inner.pause()

    async def resume(self) -> None:
        """See `Engine`."""
        await self.inner.resume()

    async def health(self) -> bool:
        """See `Engine`."""
        return await self.inner.health()
