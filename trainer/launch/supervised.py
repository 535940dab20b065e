"""The supervised start of an attempt: made before reinforcement, so that all of this begins with its weights."""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.checkpoint.slots import Slot
from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.engines.sglang_setting import look_at
from trainer.errors import UserError
from trainer.evaluate import check_lengths
from trainer.files import write_atomic
from trainer.hf_folder import served_dtype, tensor_shapes
from trainer.paths import SUPERVISED, RunPaths
from trainer.placement import served_rank, shared_gpus
from trainer.sft.start import SupervisedStart, find_supervised, require_batch
from trainer.staging import staged_folder
from trainer.start_mark import MARK, digest_of, start_facts
from trainer.tasks import make_source
from trainer.train.gpu_footprint import STATE_BYTES

log = logging.getLogger("trainer")

LITTLE = 0.05
"""Share of a GPU's memory. SmolLM2-135M's weights and optimizer take 0.02 of an H200; with activations it is 0.13."""

Learn = Callable[[RunConfig, Start], None]
"""Runs a configuration from where it stands to its end."""


def supervised_model(config: RunConfig, model: Path, start: Start, learn: Learn) -> Path:
    """The checkpoint that reinforcement starts from: that of the supervised start, made now where it is not there.

    Args:
        model: checkpoint that the supervised start begins with; returned where the run has none.
        learn: runs the supervised start on the run's ranks.

    Raises:
        UserError: its examples or the run's own data cannot be used, or the start of the run that `recover_from` names
            is missed.
        InterruptedRunError: it was asked to stop.
    """
    if not config.supervised.dataset:
        return model
    goes_on = start.slot is not None
    found = find_supervised(config, goes_on)
    if not found.done and goes_on and _taken_over(config, found):
        found = find_supervised(config, goes_on)
    if found.done:
        log.info(f"Supervised start: done before ({found.summary}), {found.paths.checkpoints}.")
        return found.paths.checkpoints
    adapters = config.model.lora.rank > 0
    if goes_on and (config.recover_from or not (config.algorithm.kl_coef or adapters)):
        _require_beside(config, start.slot)
        told = "its adapters belong to model.path" if adapters else "the weights are those of it"
        log.info(f"Supervised start: none, the run goes on from a recover checkpoint: {told}.")
        return model
    check_lengths(config, make_source(config))  # what is wrong with the data of reinforcement shows now
    require_batch(found.config)
    (found.paths.logs / MARK).unlink(missing_ok=True)  # of an earlier start that is made afresh
    learn(found.config, found.start)
    _free_memory()
    log.info(f"Supervised start: {found.paths.checkpoints} is what reinforcement starts from.")
    return found.paths.checkpoints


def may_start_beside(config: RunConfig, start: RunConfig, model: Path) -> bool:
    """Whether the run's servers may start beside its supervised start, with the weights that this begins with.

    They start in a minute or two, and are given the new weights as they join. Not where they keep the weights that
    adapters belong to, or would hold these in another dtype; nor where they would size their memory on a GPU that a
    training of more than LITTLE of it takes.

    Args:
        start: the supervised start as a run of its own. model: folder of the weights that it begins with.
    """
    if served_rank(config) or not digest_of(model) or served_dtype(model) != config.model.dtype:
        return False
    shared = shared_gpus(config, start)
    if not shared:
        return True
    allocation = config.allocation
    shares = allocation is not None and allocation.colocated and not config.train.offload
    trained = STATE_BYTES * sum(math.prod(shape) for shape in tensor_shapes(model).values())
    # By nvidia-smi: asked through PyTorch, a process that only starts ranks would take memory there.
    return shares and trained <= LITTLE * (look_at(tuple(sorted(shared))).memory_mib << 20)


def _taken_over(config: RunConfig, found: SupervisedStart) -> bool:
    """Copy the supervised checkpoint of the run that `recover_from` names, which may be removed one day."""
    # fileroot / recover / user / experiment / trial; a copy of the recover checkpoint may lie anywhere
    *root, kind, user, experiment, trial = ("", "", "", "", *Path(config.recover_from).parts)
    if kind != "recover":
        return False
    fileroot = Path(*root)
    logs = fileroot / "logs" / user / experiment / trial / SUPERVISED
    checkpoint = fileroot / "checkpoints" / user / experiment / trial / SUPERVISED
    facts = start_facts(RunPaths(logs, checkpoint, Path(config.recover_from)))
    if not facts:
        return False
    with staged_folder(found.paths.checkpoints, replace=True) as staging:
        shutil.copytree(checkpoint, staging, dirs_exist_ok=True)
    found.paths.logs.mkdir(parents=True, exist_ok=True)
    write_atomic(found.paths.logs / MARK, json.dumps({**facts, "checkpoint": str(found.paths.checkpoints)}, indent=1))
    return True


def _require_beside(config: RunConfig, slot: Slot | None) -> None:
    """Raise UserError where the KL reference, or the base of adapters, would be another model than that of the run that
    is gone on from.

    slot: the checkpoint of that run. One of the run's own was written after this had been looked at.
    """
    if slot is None or slot.path.parent == RunPaths.of(config).recover:
        return
    if config.model.lora.rank and slot.fingerprint.get("supervised.dataset"):
        raise UserError(
            f"recover_from={config.recover_from}: the adapters of that run belong to the checkpoint of its supervised "
            f"start, which is not beside it (checkpoints/USER/EXPERIMENT/TRIAL/{SUPERVISED}, with "
            f"logs/USER/EXPERIMENT/TRIAL/{SUPERVISED}/{MARK}): put both back"
        )
    if config.algorithm.kl_coef and slot.fingerprint.get("supervised.dataset"):
        raise UserError(
            f"recover_from={config.recover_from}: algorithm.kl_coef={config.algorithm.kl_coef} holds the policy near "
            "the checkpoint of that run's supervised start, which is not beside it (checkpoints/USER/EXPERIMENT/TRIAL/"
            f"{SUPERVISED}, with logs/USER/EXPERIMENT/TRIAL/{SUPERVISED}/{MARK}): put both back, or set "
            "algorithm.kl_coef=0"
        )


def _free_memory() -> None:
    """Give back what a run in this process held."""
    gc.collect()
    if torch.cuda.is_available():
        torch._dynamo.reset()  # compiled layers hold their weights
        gc.collect()
        torch.cuda.empty_cache()
