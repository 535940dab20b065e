"""Locks of files: the process that holds one writes its number into the file. The lock ends with the process."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import BinaryIO

MOUNT = "mount it with working ones (NFS 3: with rpc-statd, without nolock; Lustre: -o flock)"
LOOK_SECONDS = 10.0
"""So long a look at a lock may take, on a network file system that is slow."""
_LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


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
        OSError: the file system has no locks (ENOLCK), or no room.
    """
    try:
        _lock(file)
    except BlockingIOError:
        file.seek(0)
        raise HeldError(file.read(4096).decode(errors="replace").strip()) from None
    except OSError as error:
        if error.errno in _LOCKLESS:
            raise OSError(errno.ENOLCK, f"file locks fail ({error.strerror}): {MOUNT}", file.name) from None
        raise
    if _held_by_nobody(file):
        raise OSError(
            errno.ENOLCK, f"file locks do nothing, so that two runs could spoil one another: {MOUNT}", file.name
        )
    # Past the file's buffer: what a full disk does not take would be tried again when it is closed, and fail there.
    os.ftruncate(file.fileno(), 0)
    os.write(file.fileno(), (f"{os.getpid()}\n" if content is None else content).encode())


def _lock(file: BinaryIO) -> None:
    """Take the lock; who looks at it, as `clusterkit status` does again and again, has a share of it for a moment.

    Raises:
        BlockingIOError: another process holds it.
    """
    deadline = time.monotonic() + LOOK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails where it is no mere look
            fcntl.flock(file, fcntl.LOCK_UN)
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _held_by_nobody(file: BinaryIO) -> bool:
    """Whether the lock that we hold hinders nobody: some network file systems answer yes to every lock."""
    try:
        with open(file.name, "rb") as second:  # noqa: PTH123 (`name` may be a descriptor)
            fcntl.flock(second, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
