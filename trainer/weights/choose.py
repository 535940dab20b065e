"""The publisher that a run needs, by its servers and `weights.transport`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from trainer.config_parts import WeightsConfig
from trainer.errors import UserError
from trainer.hf_folder import served_dtype
from trainer.train.learner import Learner
from trainer.weights.environment import nccl_problem
from trainer.weights.folders import FolderPublisher, choose_root
from trainer.weights.nccl import NcclPublisher
from trainer.weights.publisher import Outlet, Publisher, agree
from trainer.weights.source import WeightSource

log = logging.getLogger(__name__)


def make_publisher(
    learner: Learner, outlet: Outlet | None, tokenizer: Any, config: WeightsConfig, run: Path
) -> Publisher:
    """Make the publisher. Collective.

    Publish once before the first rollout: that forms the groups, so that no later step waits for it.

    Args:
        learner: whose policy is published. outlet: rank 0's way to the servers, at least one of them joined; None on
            other ranks. tokenizer: saved beside weights in folders. run: the run's folder.

    Raises:
        UserError: the servers cannot take the policy, or not in the way that `weights.transport` demands.

    """
    bucket_bytes = config.bucket_mb << 20
    world = learner.world
    dtype = getattr(torch, world.broadcast(served_dtype(outlet.engine.model) if outlet is not None else ""))
    nbytes = WeightSource(learner, bucket_bytes, dtype).nbytes
    root = choose_root(config.folder, run, outlet, nbytes)
    folders = FolderPublisher(learner, outlet, tokenizer, root, bucket_bytes=bucket_bytes, dtype=dtype)
    problem = _nccl_problem(learner, outlet) if outlet is not None and config.transport != "disk" else ""
    wrong = f"weights.transport=nccl: {problem}. Change that, or set weights.transport=auto"
    agree(world, UserError(wrong) if problem and config.transport == "nccl" else None)
    if world.broadcast(config.transport == "disk" or bool(problem)):
        if outlet is not None:
            log.info("weights go through %s%s", root, f": {problem}" if problem else "")
        return folders
    return NcclPublisher(folders, outlet, config)


def _nccl_problem(learner: Learner, outlet: Outlet) -> str:
    title = outlet.engine.dialect.title
    if title != "SGLang":
        return f"{title} servers take weights through a folder only"
    if learner.world.device.type != "cuda":
        return "the trainer has no GPU to send weights from"
    return nccl_problem()
