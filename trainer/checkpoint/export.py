"""Persistent checkpoints in Hugging Face format, complete once they have their name: nothing is converted later.

All ranks write (trainer/checkpoint/shards.py), while the training waits or in the background.

Where adapters are trained, a checkpoint is the whole model with them merged in, and has them in PEFT's format in its
folder `adapter`; with checkpoint.merged=false it is the adapter alone.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.adapter_folder import INSIDE
from trainer.checkpoint.background import BackgroundWriter, HostCopy, Record
from trainer.checkpoint.shards import Shards, write_shards
from trainer.disk import disk_of
from trainer.errors import CrashError, RunError
from trainer.files import disk_error, is_full, replace_tree, sync_tree, tree_bytes
from trainer.train.adapterfiles import write_adapter
from trainer.train.distributed import World
from trainer.train.learner import Learner
from trainer.train.lora import Adapter, has_adapters
from trainer.train.model import save_description
from trainer.weights.folders import caught
from trainer.weights.source import served_state

log = logging.getLogger("trainer")


def export(learner: Learner, tokenizer: Any, folder: Path) -> Record:
    """Write weights, config and tokenizer to `folder`. Collective: every rank calls it. Returns a metrics record.

    Raises:
        RunError: it cannot be written; nothing is left at `folder`.
    """
    began = time.perf_counter()
    record = _write(_contents(learner), learner, tokenizer, folder, learner.world)
    seconds = round(time.perf_counter() - began, 4)
    return record | {"seconds": seconds, "stall_s": seconds}


class BackgroundExport:
    """Writes persistent checkpoints beside the training, from a copy of each rank's weights in host memory."""

    def __init__(self, learner: Learner, tokenizer: Any, writer: BackgroundWriter) -> None:
        self._learner, self._writer = learner, writer
        self._tokenizer = copy.deepcopy(tokenizer)  # one that encodes may not be saved by another thread
        self._copy = HostCopy(learner.world.dtype)
        self._saving: Future[Record] | None = None

    def reserve(self) -> None:
        """Begin to allocate host memory, so that the first `save` need not wait for that; further calls do nothing."""
        if not self._copy.reserved:
            self._copy.reserve(_shards(self._learner).parts)

    def save(self, folder: Path, done: Callable[[Record], None]) -> None:
        """As `export`, but returns when the weights are copied. Collective.

        Args:
            done: is given the metrics record when the folder is complete, in the writer's thread. `stall_s` is the time
                that this call took, `seconds` the time until the folder was complete.

        Raises:
            RunError: the checkpoint before this one could not be written.
        """
        began = time.perf_counter()
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()  # until then it reads from the host memory
        shards, adapters = _contents(self._learner)
        shards = replace(shards, parts=self._copy.take(shards.parts))
        stall = round(time.perf_counter() - began, 4)

        def work(apart: World) -> Record:
            record = _write((shards, adapters), self._learner, self._tokenizer, folder, apart)
            record |= {"seconds": round(time.perf_counter() - began, 4), "stall_s": stall}
            done(record)
            return record

        self._saving = self._writer.start(self._learner.world, work)


Contents = tuple[Shards, dict[str, Adapter]]
"""Weights, with adapters merged in, and these: whole, by the name of the weight that each belongs to."""


def _shards(learner: Learner) -> Shards:
    """Only looks: adapters are not merged in."""
    weights, adapters = served_state(learner)
    only_adapters = adapters and not learner.config.checkpoint.merged
    return Shards.of({} if only_adapters else weights, learner.world.dtype)


def _contents(learner: Learner) -> Contents:
    """Collective. What adapters are merged into is in host memory: it would be the weights a second time.

    A base that is at rest in host memory stays there, as servers may use the GPU; only adapters are moved, that of one
    weight at a time, for the ranks to exchange them.
    """
    if not has_adapters(learner.policy):
        return _shards(learner), {}
    shards, (weights, adapters) = _shards(learner), served_state(learner)
    merged, gathered = {}, {}
    for name, resting in adapters.items():
        one = resting.on(learner.world.device)
        if name in shards.parts:
            merged[name] = one.merged_part(weights[name]).to("cpu", learner.world.dtype)
        gathered[name] = one.gathered()
    return replace(shards, parts=shards.parts | merged), gathered


def _write(contents: Contents, learner: Learner, tokenizer: Any, folder: Path, world: World) -> Record:
    """Write a folder under a temporary name, and give it its own when it is complete. Collective."""
    temporary = folder.with_name(folder.name + ".tmp")
    (shards, adapters), lm = contents, learner.policy.lm

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        save_description(lm, world.dtype, tokenizer, temporary)
        if adapters:
            own = temporary / INSIDE if shards.pieces else temporary
            write_adapter(own, str(lm.name_or_path), learner.config.model.lora, adapters)
        sync_tree(temporary)
        replace_tree(temporary, folder)

    _agree(caught(begin) if world.is_main else None, folder, temporary, world)
    if shards.pieces:
        _agree(caught(lambda: write_shards(shards, temporary, world)), folder, temporary, world)
    _agree(caught(finish) if world.is_main else None, folder, temporary, world)
    return {"path": str(folder), "bytes": tree_bytes(folder) if world.is_main else 0}


def _agree(problem: Exception | None, folder: Path, temporary: Path, world: World) -> None:
    """Raise what went wrong on any rank on all of them, so that none waits for another. Collective."""
    of_disk = problem is not None and disk_error(problem) is not None
    if problem is not None and not of_disk:
        log.error("cannot write the checkpoint %s", folder, exc_info=problem)
    told = next((one for one in world.gather((_explain(problem, folder, world.place), of_disk)) if one[0]), None)
    if told is None:
        return
    if world.is_main:
        shutil.rmtree(temporary, ignore_errors=True)
    # A new start may help where it was not the disk, which somebody has to mend.
    raise (RunError if told[1] else CrashError)(told[0]) from problem


def _explain(problem: Exception | None, folder: Path, place: str) -> str:
    if problem is None:
        return ""
    if (system := disk_error(problem)) is None:
        return f"cannot write the checkpoint {folder}{place}: {type(problem).__name__}: {problem}"
    reason, remedy = system.strerror or str(system), "Make the folder writable"
    if is_full(system):
        reason, remedy = "no space left on the disk", "Free some space"
    return (
        f"cannot write the checkpoint {folder}{place}: {reason}. {remedy}, then start the same command again to go on "
        f"from the last recover checkpoint. {disk_of(folder)}"
    )


def parameter_digest(learner: Learner) -> str:
    """SHA-256 over all parameters, names included: equal digests mean bit-identical weights. Collective."""
    learner.wake(state=False)
    digest = hashlib.sha256()
    for name, parameter in sorted(learner.policy.named_parameters()):
        full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(name.encode())
        digest.update(full.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
