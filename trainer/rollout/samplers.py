"""What samplers are made of, and the one in the trainer's own process; on servers: trainer.rollout.server_sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.agents.base import AnyAgent
from trainer.config import RunConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.rewards import Reward
from trainer.rollout.controller import RolloutController
from trainer.rollout.sampler import EmbeddedSampler
from trainer.schedule import Schedule
from trainer.tasks.base import TaskSource
from trainer.train.distributed import World
from trainer.train.logprobs import PolicyModel


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """What samplers of all kinds are made of.

    stop_ids: token ids that end a response. stop: asked between turns whether the batch is to be given up. window:
    tokens that a conversation may have.
    """

    config: RunConfig
    world: World
    source: TaskSource
    course: Schedule
    agent: AnyAgent
    reward: Reward
    stop_ids: set[int]
    stop: Callable[[], bool]
    window: int

    def controller(self, engine: Any) -> RolloutController:
        """A controller over an engine."""
        return RolloutController(self.agent, engine, self.config.seed, self.stop, self.reward, self.window)


def embedded_sampler(parts: SamplerParts, replica: Any, policy: PolicyModel) -> EmbeddedSampler:
    """Sampling in every rank's own process. replica: the unsharded model that is sampled from."""
    c = parts.config.rollout
    engine = EmbeddedEngine(replica, parts.stop_ids, c.max_batch_tokens, parts.stop, c.share_prefixes)
    return EmbeddedSampler(
        parts.config, parts.source, parts.course, engine, parts.controller(engine), parts.world, replica, policy
    )
