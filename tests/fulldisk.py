"""Fills a disk, at once or at a chosen moment of a training."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainer import base_run


def leave(folder: Path, free: int) -> None:
    """Fill the disk of a folder until only `free` bytes are left."""
    with (folder / "ballast").open("ab", buffering=0) as file, suppress(OSError):
        while (room := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize) > free:
            file.write(bytes(min(room - free, 1 << 20)))


def fill_when_called(folder: Path, free: int, name: str) -> None:
    """Have this process fill the disk once it calls a function of a training: no test could fill it at that moment.

    name: of the function in `trainer.base_run`.
    """
    call = getattr(base_run, name)

    def fill(*arguments: object) -> object:
        result = call(*arguments)
        leave(folder, free)
        return result

    setattr(base_run, name, fill)
