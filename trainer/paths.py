"""Where a run's files lie; see docs/run-directory.md."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.assets import cache_root

if TYPE_CHECKING:  # readers of runs need the names of folders, and not all settings
    from trainer.config import RunConfig

SUPERVISED = "supervised"
"""Folder of a run's supervised start, in each of the run's own."""


def user_name() -> str:
    """Login name, or the user's number where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cache_folder(config: RunConfig) -> Path:
    """Folder of warm-up weights and assets."""
    return cache_root(config.cache_dir).absolute()


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The three folders of a run."""

    logs: Path
    checkpoints: Path
    recover: Path

    @classmethod
    def of(cls, config: RunConfig) -> RunPaths:
        """Folders of the run that a configuration names."""
        root = Path(config.fileroot).expanduser().absolute()
        tail = Path(user_name(), config.experiment_name, config.trial_name)
        return cls(root / "logs" / tail, root / "checkpoints" / tail / "actor", root / "recover" / tail)

    @property
    def supervised(self) -> RunPaths:
        """Those of its supervised start; `checkpoints` is the folder of its one checkpoint."""
        return RunPaths(self.logs / SUPERVISED, self.checkpoints.with_name(SUPERVISED), self.recover / SUPERVISED)


def new_attempt(logs: Path) -> int:
    """Create the folder of the next free attempt under a run's log folder and return its number."""
    number = max((int(p.name[8:]) for p in logs.glob("attempt_*") if p.name[8:].isdigit()), default=0)
    while True:
        number += 1
        try:
            (logs / f"attempt_{number}").mkdir()
        except FileExistsError:
            continue
        return number
