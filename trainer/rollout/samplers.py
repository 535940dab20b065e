"""What samplers are made of, and how they are built: in the trainer's own process, or over a run's servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.agents.base import AnyAgent
from trainer.config import RunConfig
from trainer.connections import collect_seldom
from trainer.engines.dialects import make_dialect
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.http import Limits, ServerPool
from trainer.engines.served import ServedEngine
from trainer.errors import UserError
from trainer.paths import RunPaths
from trainer.placement import gives_memory_away, served_versions, serves_adapters
from trainer.rewards import Reward
from trainer.rollout.background import BackgroundLoop
from trainer.rollout.controller import RolloutController
from trainer.rollout.sampler import EmbeddedSampler
from trainer.rollout.server_sampler import Served, ServedSampler
from trainer.rollout.workers import Workers
from trainer.schedule import Schedule
from trainer.serving import registry
from trainer.serving.fleet import Fleet
from trainer.tasks.base import TaskSource
from trainer.train.distributed import World
from trainer.train.learner import Learner
from trainer.train.logprobs import PolicyModel
from trainer.weights.choose import make_adapter_publisher, make_publisher
from trainer.weights.publisher import Outlet, Publisher


def served_sampler(
    parts: SamplerParts, model: Path, learner: Learner | None, tokenizer: Any, stop: Callable[[], bool]
) -> ServedSampler:
    """Make the sampler.

    Args:
        model: folder of the weights that the run begins with.
        learner: its weights are published; None where nothing is trained.
    """
    config, world = parts.config, parts.world
    served = serve(parts, model) if world.is_main else None

    def publisher() -> Publisher | None:
        if learner is None:
            return None
        outlet = Outlet(served.engine, served.loop.submit, stop) if served is not None else None
        shared = config.allocation is not None and config.allocation.colocated
        run, trades = RunPaths.of(config).logs, gives_memory_away(config)
        if serves_adapters(config):
            return make_adapter_publisher(learner, outlet, tokenizer, config.weights, run)
        return make_publisher(learner, outlet, tokenizer, config.weights, run, shares_gpus=shared, trades_memory=trades)

    return ServedSampler(config, parts.source, parts.course, world, stop, served, publisher)


def serve(parts: SamplerParts, model: Path) -> Served:
    """Rank 0's engine, its servers, and the thread in which it talks to them."""
    config = parts.config
    collect_seldom()
    dialect = make_dialect("sglang" if config.engine == "sglang" else "vllm", serves_adapters(config))
    loop = BackgroundLoop()
    c = config.serving
    pool = ServerPool(dialect.health_path, Limits.beside(c.hang_seconds))
    # A server that died is started again by its host: until then nothing is lost and nothing fails.
    pool.least, pool.patience = max(c.min_required, 1), c.patience_seconds or c.start_seconds
    pool.hangs_allowed = max(c.restarts, 1)
    engine = ServedEngine(pool, dialect, model, parts.stop_ids)
    engine.versions = served_versions(config)
    engine.sharing.enabled = config.rollout.share_prefixes
    engine.sharing.ahead = config.rollout.prefetch_sections
    fleet = Fleet(engine, registry.folder_of(RunPaths.of(config).logs), config)
    controller = parts.controller(engine)
    workers = None
    if config.rollout.controllers:
        if controller.asks_others:
            raise UserError(
                "rollout.controllers: a reward that asks a judge is scored in one process: set rollout.controllers=0"
            )
        workers = Workers(config, model, parts.stop_ids, parts.window, engine, parts.source.train)
        engine.others = workers
    return Served(engine, fleet, controller, loop, workers)


@dataclass(frozen=True, slots=True)
class SamplerParts:
    """What samplers of all kinds are made of.

    stop_ids: token ids that end a response. stop: asked between turns whether the batch is to be given up. window:
    tokens that a conversation may have. ways: of the closing table, by their names.
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
    ways: Mapping[str, AnyAgent] = field(default_factory=dict)

    def controller(self, engine: Any) -> RolloutController:
        """A controller over an engine."""
        c = self.config
        return RolloutController(self.agent, engine, c.seed, self.stop, self.reward, self.window, self.ways)


def embedded_sampler(parts: SamplerParts, replica: Any, policy: PolicyModel) -> EmbeddedSampler:
    """Sampling in every rank's own process. replica: the unsharded model that is sampled from."""
    c = parts.config.rollout
    engine = EmbeddedEngine(replica, parts.stop_ids, c.max_batch_tokens, parts.stop, c.share_prefixes)
    return EmbeddedSampler(
        parts.config, parts.source, parts.course, engine, parts.controller(engine), parts.world, replica, policy
    )
