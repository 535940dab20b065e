"""Building the sampler of a run that has servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.engines.dialects import make_dialect
from trainer.engines.http import ServerPool
from trainer.engines.served import ServedEngine
from trainer.paths import RunPaths
from trainer.placement import gives_memory_away
from trainer.rollout.background import BackgroundLoop
from trainer.rollout.samplers import SamplerParts
from trainer.rollout.server_sampler import Served, ServedSampler
from trainer.serving import registry
from trainer.serving.fleet import Fleet
from trainer.train.learner import Learner
from trainer.weights.choose import make_publisher as choose_publisher
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.folders import FolderPublisher
from trainer.weights.publisher import Outlet, Publisher

SHARED_BUCKET_MB = 512
"""Of a GPU's memory, while the server on it reads weights out of the trainer's."""


def served_sampler(
    parts: SamplerParts, model: Path, learner: Learner | None, tokenizer: Any, stop: Callable[[], bool]
) -> ServedSampler:
    """Sampling on servers. model: folder that the servers start with. learner: None where nothing is trained.
    stop: whether the run is to stop.
    """
    config, world = parts.config, parts.world
    served = serve(parts, model) if world.is_main else None

    def publisher() -> Publisher | None:
        return make_publisher(config, learner, tokenizer, served, stop) if learner is not None else None

    return ServedSampler(config, parts.source, parts.course, world, stop, served, publisher)


def make_publisher(
    config: RunConfig, learner: Learner, tokenizer: Any, served: Served | None, stop: Callable[[], bool]
) -> Publisher:
    """How weights reach the servers that are there now. Collective. stop: whether the run is to stop.

    Raises:
        UserError: the trained tensors are not those of the servers' model.

    """
    outlet = Outlet(served.engine, served.loop.submit, stop) if served is not None else None
    weights, shared = config.weights, config.allocation is not None and config.allocation.colocated
    if shared:  # NCCL cannot have two processes on one GPU
        weights = weights.model_copy(update={"transport": "disk"})
    publisher = choose_publisher(learner, outlet, tokenizer, weights, RunPaths.of(config).logs)
    if gives_memory_away(config) and outlet is not None and isinstance(publisher, FolderPublisher):
        return ColocatedPublisher(publisher, outlet, min(weights.bucket_mb, SHARED_BUCKET_MB))
    return publisher


def serve(parts: SamplerParts, model: Path) -> Served:
    """Rank 0's engine, its servers, and the thread in which it talks to them."""
    config = parts.config
    dialect = make_dialect("sglang" if config.engine == "sglang" else "vllm")
    loop = BackgroundLoop()
    pool = ServerPool(dialect.health_path)
    # A server that died is started again by its host: until then nothing is lost and nothing fails.
    c = config.serving
    pool.least, pool.patience = max(c.min_required, 1), c.patience_seconds or c.start_seconds
    engine = ServedEngine(pool, dialect, model, parts.stop_ids)
    fleet = Fleet(engine, registry.folder_of(RunPaths.of(config).logs), config)
    return Served(engine, fleet, parts.controller(engine), loop)
