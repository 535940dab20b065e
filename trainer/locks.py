"""Locks of files: the process that holds one writes its number into the file. The lock ends with the process."""

from __future__ import annotations

import fcntl
import os
from typing import BinaryIO


class HeldError(Exception):
    """Another process holds the lock. holder: what it wrote into the file."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def hold(file: BinaryIO, content: str | None = None) -> None:
    """Hold the lock of a file until it is closed, and write our process's number, or `content`, into it.

    Args:
        file: opened for appending; its name stays, since the lock is on this very file.
        content: None for the number of our process.

    Raises:
        HeldError: another process holds it.
        OSError: the file system has no locks, or no room.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise HeldError(file.read(4096).decode(errors="replace").strip()) from None
    # Past the file's buffer: what a full disk does not take would be tried again when it is closed, and fail there.
    os.ftruncate(file.fileno(), 0)
    os.write(file.fileno(), (f"{os.getpid()}\n" if content is None else content).encode())
