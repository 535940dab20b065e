"""The end of a rank: what it leaves where something behind it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from forkserver import CONTEXT

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import CrashError
from trainer.launch import rank_run
from trainer.launch.rank_job import RankJob
from trainer.paths import RunPaths
from trainer.signals import StopFlag


def end_of_rank(folder: Path, kind: str, rank: int = 0) -> int:
    """Exit code of a rank's process that ends in this way: `lost`, `full` or `told` (a full disk in our own words)."""
    process = CONTEXT.Process(target=main, args=(folder, kind, rank))
    process.start()
    process.join(timeout=300)
    assert process.exitcode is not None
    return process.exitcode


def main(meeting: Path, kind: str, rank: int) -> None:
    config = RunConfig(fileroot=str(meeting / "runs"))
    RunPaths.of(config).logs.mkdir(parents=True)

    def make_run(*_: object) -> None:
        if kind == "lost":
            raise CrashError("server-1 was lost")
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(meeting / "summary.json"))
        error = rank_run.full_disk(full, config) if kind == "told" else None
        if error is not None:
            raise error from full
        raise full

    rank_run.join_world = lambda *_: None  # the others are not there
    rank_run.make_run = make_run  # a server that dies in a publication, or a full disk, stands behind it
    job = RankJob(config, meeting, 1, Start(None), meeting, f"file://{meeting}/rendezvous")
    rank_run.rank_main(rank, job, StopFlag())
