"""Running totals of an engine over servers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

EVALUATES: ContextVar[bool] = ContextVar("EVALUATES", default=False)
"""Whether requests of this asyncio task are of an evaluation."""


@dataclass(slots=True)
class ServedStats:
    """Running totals. Tokens: `cached_tokens` of the prompt tokens were in a server's prefix cache.

    evaluated_prompt_tokens, evaluated_cached_tokens, evaluated_ahead_tokens: of those of that name without `evaluated`
    the ones of evaluations.
    ahead_requests, ahead_tokens: sent only to have a prefix read, and the tokens that were computed for them; neither
    counts among the requests and prompt tokens. interrupted: responses cut off for an update, which went on
    afterwards. context_tokens: Σ over sampled tokens of the tokens before each. request_seconds: Σ of the time that
    each request was under way; busy_seconds: in which there was any. The other seconds are the last update's: until
    nothing ran any more and all servers were paused, for bringing the weights onto all of them, until requests flowed
    again, and all of that in which none could be sent.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ahead_requests: int = 0
    ahead_tokens: int = 0
    evaluated_prompt_tokens: int = 0
    evaluated_cached_tokens: int = 0
    evaluated_ahead_tokens: int = 0
    sampled_tokens: int = 0
    interrupted: int = 0
    context_tokens: float = 0.0
    request_seconds: float = 0.0
    busy_seconds: float = 0.0
    pause_seconds: float = 0.0
    transfer_seconds: float = 0.0
    resume_seconds: float = 0.0
    interruption_seconds: float = 0.0

    @property
    def served_tokens(self) -> int:
        """Prompt tokens that did not have to be computed: those from a cache, less those that were put there for it."""
        return max(0, self.cached_tokens - self.ahead_tokens)  # a server may keep no cache

    def cached_share_since(self, before: ServedStats) -> float | None:
        """Share of the prompt tokens since then, without those of evaluations, that came from a cache; None: none were
        sent.
        """

        def counted(name: str) -> int:
            now, then = (getattr(one, name) - getattr(one, f"evaluated_{name}") for one in (self, before))
            return int(now - then)

        prompts = counted("prompt_tokens")
        served = counted("cached_tokens") - counted("ahead_tokens")
        return min(1.0, max(0, served) / prompts) if prompts else None
