"""Building the sampler of a run that has servers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.checkpoint.export import export
from trainer.engines.dialect import make_dialect
from trainer.engines.http import ServerPool
from trainer.engines.served import ServedEngine
from trainer.paths import RunPaths
from trainer.rollout.background import BackgroundLoop
from trainer.rollout.making import SamplerParts
from trainer.rollout.served import Served, ServedSampler
from trainer.serving import registry
from trainer.serving.fleet import Fleet
from trainer.train.learner import Learner


def served_sampler(
    parts: SamplerParts, model: Path, learner: Learner, tokenizer: Any, stop: Callable[[], bool]
) -> ServedSampler:
    """Sampling on servers. model: folder that the servers start with. stop: whether the run is to stop."""
    config, world = parts.config, parts.world
    paths = RunPaths.of(config)
    served = serve(parts, model) if world.is_main else None
    publisher = make_publisher(learner, tokenizer, paths.logs / "weights", served)
    return ServedSampler(config, parts.source, parts.course, world, stop, served, publisher)


def make_publisher(
    learner: Learner, tokenizer: Any, folder: Path, served: Served | None
) -> Callable[[int], dict[str, float]]:
    """Through folders."""

    def publish(version: int) -> dict[str, float]:
        export(learner, tokenizer, folder / f"v{version}")
        problem: Exception | None = None
        if served is not None:
            try:
                served.loop.run(served.engine.update_from_folder(folder / f"v{version}", version))
            except Exception as error:
                problem = error
        learner.world.broadcast(problem)
        if problem:
            raise problem
        return {}

    return publish


def serve(parts: SamplerParts, model: Path) -> Served:
    """Rank 0's engine, its servers, and the thread in which it talks to them."""
    config = parts.config
    dialect = make_dialect("sglang" if config.engine == "sglang" else "vllm")
    loop = BackgroundLoop()
    engine = ServedEngine(ServerPool(dialect.health_path), dialect, model, parts.stop_ids)
    fleet = Fleet(engine, registry.folder_of(RunPaths.of(config).logs), config, time.time())
    return Served(engine, fleet, parts.controller(engine), loop)
