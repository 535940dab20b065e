"""The publisher that a run needs, and what NCCL must be told before it is first used."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch

from trainer.config import RunConfig
from trainer.config_parts import WeightsConfig
from trainer.errors import UserError
from trainer.hf_folder import served_dtype
from trainer.train.learner import Learner
from trainer.weights.adapters import AdapterPublisher
from trainer.weights.colocated import ColocatedPublisher
from trainer.weights.folders import FolderPublisher, choose_root
from trainer.weights.nccl import NcclPublisher
from trainer.weights.publisher import Outlet, Publisher, agree
from trainer.weights.source import WeightSource

log = logging.getLogger(__name__)


def make_publisher(
    learner: Learner,
    outlet: Outlet | None,
    tokenizer: Any,
    config: WeightsConfig,
    run: Path,
    *,
    shares_gpus: bool = False,
    trades_memory: bool = False,
) -> Publisher:
    """Make the publisher. Collective.

    Publish once before the first rollout: that forms the groups, so that no later step waits for it.

    Args:
        outlet: rank 0's way to the servers, at least one of them joined; None on other ranks.
        shares_gpus: trainer and servers are on the same GPUs, where NCCL cannot have two processes: SGLang's read the
            weights from the ranks' memory, unless the transport is disk.
        trades_memory: servers free their GPU memory while the trainer learns (`placement.gives_memory_away`).

    Raises:
        UserError: the servers cannot take the policy, or not in the way that `weights.transport` demands.
    """
    transport = "disk" if shares_gpus else config.transport
    bucket_bytes = config.bucket_mb << 20
    world = learner.world
    dtype = getattr(torch, world.broadcast(served_dtype(outlet.engine.model) if outlet is not None else ""))
    nbytes = WeightSource(learner, bucket_bytes, dtype).nbytes
    root = choose_root(config.folder, run, outlet, nbytes)
    folders = FolderPublisher(learner, outlet, tokenizer, root, bucket_bytes=bucket_bytes, dtype=dtype)
    problem = _transport_problem(learner, outlet) if outlet is not None and transport != "disk" else ""
    wrong = f"weights.transport=nccl: {problem}. Change that, or set weights.transport=auto"
    agree(world, UserError(wrong) if problem and transport == "nccl" else None)
    if world.broadcast(transport != "disk" and not problem):
        return NcclPublisher(folders, outlet, config)
    if trades_memory or world.broadcast(shares_gpus and config.transport != "disk" and _is_sglang(outlet)):
        return ColocatedPublisher(folders, outlet, min(config.bucket_mb, SHARED_BUCKET_MB), trades=trades_memory)
    if outlet is not None:
        log.info("weights go through %s%s", root, f": {problem}" if problem else "")
    return folders


def make_adapter_publisher(
    learner: Learner, outlet: Outlet | None, tokenizer: Any, config: WeightsConfig, run: Path
) -> Publisher:
    """As `make_publisher`, for servers that keep the base's weights (`placement.serves_adapters`)."""
    dtype = getattr(torch, learner.world.broadcast(served_dtype(outlet.engine.model) if outlet is not None else ""))
    # A server that has put the adapter of a version in use out of its memory reads it again.
    keep = outlet.engine.versions + 1 if outlet is not None else 2
    nbytes = 4 * sum(p.numel() for p in learner.policy.parameters() if p.requires_grad)
    root = choose_root(config.folder, run, outlet, nbytes, keep)
    return AdapterPublisher(learner, outlet, tokenizer, root, keep, config.bucket_mb << 20, dtype)


def _is_sglang(outlet: Outlet | None) -> bool:
    return outlet is not None and outlet.engine.dialect.title == "SGLang"


def _transport_problem(learner: Learner, outlet: Outlet) -> str:
    if not _is_sglang(outlet):
        return f"{outlet.engine.dialect.title} servers take weights through a folder only"
    if learner.world.device.type != "cuda":
        return "the trainer has no GPU to send weights from"
    return nccl_problem()


SHARED_BUCKET_MB = 512
"""Most GPU memory of the buffer that a server on the trainer's own GPU reads weights from, in MiB."""
NCCL_SETTINGS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Both ends need these. SGLang sets them for itself; without them on the trainer's side the first broadcast fails with
«Cuda failure 'invalid argument'», in the middle of an update."""


def prepare_nccl(config: RunConfig) -> None:
    """Set NCCL_SETTINGS where this run may use NCCL, before the ranks meet; the user's own values stay."""
    if config.num_servers and config.weights.transport != "disk":
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)


def nccl_problem() -> str:
    """Why weights cannot go over NCCL from this process; empty when they can."""
    wrong = [
        f"{name}={os.environ.get(name, '')}" for name, value in NCCL_SETTINGS.items() if os.environ.get(name) != value
    ]
    if not wrong:
        return ""
    required = " ".join(f"{name}={value}" for name, value in NCCL_SETTINGS.items())
    return f"NCCL needs {required} in the trainer's environment before it starts, and there is {' '.join(wrong)}"
