"""Atomic folders: filled beside their place, synced and renamed; temporary ones. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType

from trainer.disk import disk_of
from trainer.errors import RunError, UserError
from trainer.files import sync, sync_tree


@contextmanager
def staged_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends without an exception.

    After an exception, Ctrl-C or SIGTERM (raised as KeyboardInterrupt) nothing of it is left. What a killed process has
    left is removed by the next call for the same target. An existing target is replaced with `replace`, else an error.

    Raises:
        UserError: the parent folder cannot be written, or the target exists.
        RunError: the disk is full or broken.
    """
    parent = target.parent
    with _explained(target):
        parent.mkdir(parents=True, exist_ok=True)
        restore_replaced(target)
        _sweep(parent, f".{target.name}.partial-*")
        if target.exists() and not replace:
            raise UserError(f"{target} exists already: remove it, or choose another place")
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=parent))
    # The lock tells a later call that this folder is in use. It goes with the process, however that ends.
    lock = os.open(staging, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        with _sigterm_interrupts(), _explained(target):
            yield staging
            _publish(staging, target, replace)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _publish(staging: Path, target: Path, replace: bool) -> None:
    # mkdtemp and safetensors make files for the owner alone; a cache on shared storage is read by others.
    umask = os.umask(0)
    os.umask(umask)
    for path in (staging, *staging.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
    sync_tree(staging)
    replaced = target.with_name(f".{target.name}.replaced")
    if replace and target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    try:
        staging.rename(target)
    except OSError:
        restore_replaced(target)
        raise
    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(target: Path) -> None:
    """Restore the old folder of a replacement that was killed between its two renames."""
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists() and not target.exists():
        replaced.rename(target)


@contextmanager
def nothing_if_refused(folder: Path) -> Iterator[list[Path]]:
    """Remove what a block has made where it is refused (exit code 2): its files, and folders that hold nothing else.

    Yields a list for the files. Of `folder` and those above it only those go that were not there before.
    """
    made = list(takewhile(lambda place: not os.path.lexists(place), (folder, *folder.parents)))
    files: list[Path] = []
    try:
        yield files
    except UserError as error:
        if error.exit_code == UserError.exit_code:
            with suppress(OSError):  # a folder with something of others
                for file in files:
                    file.unlink(missing_ok=True)
                for place in made:
                    place.rmdir()
        raise


@contextmanager
def temporary_folder(name: str) -> Iterator[Path]:
    """Yield an empty folder in TMPDIR, which is removed when the block ends.

    What a killed process of this user and host has left is removed by the next call for the same name.
    """
    root, prefix = Path(tempfile.gettempdir()), f"clusterkit-{name}-{platform.node()}-"
    _sweep(root, prefix + "[a-z0-9_]" * 8, own=True)  # as mkdtemp names them: not those of a host named HOST-1
    folder, lock = _locked_folder(root, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(root: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder and lock it; another process may sweep it away before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks, or one who sweeps at this moment
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _sweep(parent: Path, pattern: str, *, own: bool = False) -> None:
    """Remove folders of a pattern that no living process has locked. own: those of this user alone."""
    for leftover in parent.glob(pattern):
        with suppress(OSError):
            descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)  # a pipe would wait for ever
            try:
                if not own or os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner lives
                    shutil.rmtree(leftover, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def _explained(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = target.parent
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise disk_full(where) from error
        if error.errno in {errno.EEXIST, errno.ENOTEMPTY} and target.exists():
            raise UserError(f"{target} exists already: another process has just made it") from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}:
            path = error.filename or where
            raise UserError(
                f"{path} cannot be used ({error.strerror}): change its rights or choose another folder"
            ) from error
        raise RunError(f"{target} could not be made: {error}") from error


def disk_full(where: Path) -> RunError:
    """Make the error of a full disk."""
    return RunError(
        f"no space left on the disk of {where}: free some space or choose a folder on another disk. {disk_of(where)}"
    )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM end the block like Ctrl-C, so that it is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (signal's signature)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
