"""The engine protocol: token ids in, token ids with log-probs and a weight version out.

Engines are interchangeable: `embedded` shares the trainer's weights in process; servers (SGLang, vLLM) sit behind
the same calls (`served`). How an engine takes new weights is its own affair. Sampling in training always covers the
whole vocabulary (top_p 1, top_k off).
"""

from __future__ import annotations

from typing import Protocol

from trainer.errors import RunError
from trainer.types import Completion, SamplingParams


class EngineError(RunError):
    """A request could not be answered; the message names the server and what to do next."""


class EngineGoneError(EngineError):
    """No request can be answered any more: no server is left, and none came in the time that the run gives them."""


class Engine(Protocol):
    """What the rollout controller and the agents need from an engine."""

    async def generate(self, prompt_ids: list[int], params: SamplingParams, *, key: str = "") -> Completion:
        """Sample one response. `key` names the task, so that servers can keep one group on one machine.

        Raises:
            EngineError: it was not answered. EngineGoneError: nor would any other be.
        """

    def prefetch(self, prefix_ids: list[int], *, key: str = "") -> None:
        """Say that the next prompts of this key are going to begin with these ids: an engine may read them ahead.

        Changes no response; an engine may do nothing about it.
        """
