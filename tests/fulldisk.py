"""Fills a disk, at once or as soon as a trainer has found room there for its checkpoints."""

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


def fill_when_looked_at(folder: Path, free: int) -> None:
    """Have this process fill the disk once it has looked for room: no test could fill it at just that moment."""
    look = base_run.room_warning

    def fill(*arguments: object) -> str:
        told = look(*arguments)  # type: ignore[arg-type]
        leave(folder, free)
        return told

    base_run.room_warning = fill
