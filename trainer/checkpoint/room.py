"""Whether the disks of a run have room for the checkpoints that it will write, looked at before it learns anything."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.slots import SLOTS
from trainer.config import RunConfig
from trainer.disk import bytes_text, disk_of, free_of, mount_of
from trainer.errors import RunError
from trainer.paths import RunPaths
from trainer.train.learner import Learner
from trainer.train.lora import is_adapter

RECOVER_BYTES = 12
"""Of a parameter that is trained: float32 weight and AdamW's two moments."""
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """Bytes of one recover checkpoint and of one persistent checkpoint, but for what describes them."""

    recover: int
    persistent: int

    @classmethod
    def of(cls, learner: Learner) -> CheckpointSizes:
        """Of what a learner trains, whole, however many ranks share it."""
        trained = sum(one.numel() for group in learner.optimizer.param_groups for one in group["params"])
        sizes = [(is_adapter(name), one.numel()) for name, one in learner.policy.named_parameters()]
        adapters = sum(count for adapter, count in sizes if adapter)
        whole = sum(count for adapter, count in sizes if not adapter)
        weights = learner.world.dtype.itemsize * whole if learner.config.checkpoint.merged or not adapters else 0
        return cls(RECOVER_BYTES * trained, weights + FLOAT32 * adapters)


def require_room(config: RunConfig, lm: Any) -> None:
    """Raise RunError where no recover checkpoint of a run that trains all of a model fits; `lm` may be without weights.

    Before a warm-up, a supervised start and the run's servers, which take minutes. Adapters are small, and are looked
    at with the rest before the first step.
    """
    if config.trainer.type == "null" or config.model.lora.rank:
        return
    paths = RunPaths.of(config)
    remove_torn(paths.recover, paths.checkpoints)
    sizes = CheckpointSizes(RECOVER_BYTES * sum(one.numel() for one in lm.parameters()), 0)
    if problem := room_problem(paths.recover, sizes):
        raise RunError(problem)


def remove_torn(recover: Path, persistent: Path) -> None:
    """Remove what a kill left of checkpoints that were being written or removed: the next ones take its room."""
    torn = [recover / f"{name}{ending}" for name in SLOTS for ending in (".tmp", ".old")]
    for folder in (*torn, *persistent.glob("epoch*globalstep*.tmp")):
        shutil.rmtree(folder, ignore_errors=True)


def room_problem(recover: Path, sizes: CheckpointSizes) -> str:
    """Why not one recover checkpoint fits, with the way out; empty where one may. recover: their folder."""
    free = free_of(recover, reserved=os.geteuid() == 0)
    if free is None or free >= sizes.recover:
        return ""
    return (
        f"no space left for a recover checkpoint under {recover}, which takes {bytes_text(sizes.recover)}: free some "
        "space there, then start the same command again to go on; or begin in another folder, fileroot=FOLDER. "
        f"{disk_of(recover)}"
    )


def room_warning(recover: Path, persistent: Path, sizes: CheckpointSizes, steps: int, saves: int) -> str:
    """What to tell where less is free than the run's checkpoints will take; empty where it is enough, or is not known.

    Args:
        recover: folder of the recover checkpoints. persistent: that of the persistent ones.
        steps: steps that are left. saves: persistent checkpoints that are left.
    """
    present = sum((recover / name).is_dir() for name in SLOTS)
    slots = min(len(SLOTS) + 1 - present, steps)  # a new one is whole before it takes the place of the older one
    wanted: dict[Path, int] = {}
    for folder, size in ((recover, slots * sizes.recover), (persistent, saves * sizes.persistent)):
        disk = mount_of(folder)
        wanted[disk] = wanted.get(disk, 0) + size
    full = [disk for disk, size in wanted.items() if (free := free_of(disk)) is not None and free < size]
    if not full:
        return ""
    return (
        f"the disk will be full before the run ends: {slots} x {bytes_text(sizes.recover)} for recover checkpoints "
        f"(two are kept, and the next is written beside them) and {saves} x {bytes_text(sizes.persistent)} for "
        f"persistent ones are to come, and trajectories on top. {'. '.join(map(disk_of, full))}: free some space, "
        "write persistent ones less often (checkpoint.save_freq_steps, save_freq_epochs), or begin in another folder, "
        "fileroot=FOLDER"
    )
