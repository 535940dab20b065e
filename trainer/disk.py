"""Messages for a file that cannot be written or read: its path, its disk, and what to do."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import RunError, UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
LOST = (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def file_failure(error: OSError, path: Path | str | None = None, instead: str = "") -> UserError:
    """Make the exception for an operating system's error about a file or folder.

    Args:
        path: the file or folder, where the error does not name it.
        instead: how to choose another place, such as "choose another folder with --fileroot FOLDER".

    Returns:
        RunError where the disk is full or lost; UserError (exit code 2) where the path cannot be used.
    """
    place = Path(os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path or ".").absolute()
    also = f", or {instead}" if instead else ""
    if error.errno == errno.ENOSPC:
        return RunError(f"cannot write {place}: no space left on its disk. {disk_of(place)}: free some{also}")
    if error.errno == errno.EDQUOT:
        return RunError(
            f"cannot write {place}: no space left on its disk for you, your quota is used up. {disk_of(place)}: remove "
            f"what you do not need{also}"
        )
    if error.errno in LOST:
        return RunError(f"{place}: {error.strerror}. {disk_of(place)}, and does not answer: mount it again{also}")
    if error.errno not in REFUSED:
        way = f": {instead}" if instead else ""
        return UserError(f"cannot use {place}: {error.strerror or error}. {disk_of(place)}{way}")
    return UserError(f"cannot use {place}: {error.strerror}. {_cause(error, place)}{also}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block that has none, such as that of a write."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def file_failures(path: Path, instead: str = "") -> Iterator[None]:
    """Raise `file_failure` for any OSError of the block."""
    try:
        yield
    except OSError as error:
        raise file_failure(error, path, instead) from None


def disk_of(path: Path) -> str:
    """Describe the disk of a path, which need not exist: "The disk at /data has 1.5 GiB free of 20.0 GiB"."""
    mount = mount_of(path)
    try:
        found = os.statvfs(_nearest(path))
    except OSError as error:
        return f"The disk at {mount} cannot be looked at ({error.strerror})"
    text = f"The disk at {mount} has {bytes_text(found.f_bavail * found.f_frsize)} free of "
    text += bytes_text(found.f_blocks * found.f_frsize)
    if found.f_files and not found.f_favail:
        text += " and no room for another file, whatever its size (inodes)"
    return text


def mount_of(path: Path) -> Path:
    """Return where the disk of a path, which need not exist and may lead through links, is mounted."""
    mount = Path(os.path.realpath(_nearest(path)))
    with suppress(OSError):
        while not mount.is_mount() and mount != mount.parent:
            mount = mount.parent
    return mount


def free_of(path: Path, *, reserved: bool = False) -> int | None:
    """Return the bytes that are free on the disk of a path, which need not exist; None where it does not say.

    A quota counts only where the file system tells of it, as XFS and Lustre do for projects.

    Args:
        reserved: those that are kept for root count, too: ext4 keeps one of twenty.
    """
    try:
        found = os.statvfs(_nearest(path))
    except OSError:
        return None
    return (found.f_bfree if reserved else found.f_bavail) * found.f_frsize if found.f_blocks else None


def is_full(path: Path) -> bool:
    """Whether the disk of a path is full, or nearly."""
    try:
        found = os.statvfs(_nearest(path))
    except OSError:
        return False
    no_inode = found.f_files > 0 and not found.f_favail
    return found.f_blocks > 0 and (found.f_bavail * found.f_frsize < 1 << 16 or no_inode)


def _cause(error: OSError, place: Path) -> str:
    """Why a path cannot be used, and what to do."""
    nearest = _nearest(place)
    if error.errno == errno.EROFS:
        return f"{disk_of(place)} and is mounted for reading only: mount it for writing"
    if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
        kind = "folder" if nearest.is_dir() else "file"
        return f"{nearest} is a {kind}, and a {'file' if kind == 'folder' else 'folder'} is wanted there: move it away"
    if error.errno == errno.ENAMETOOLONG:
        longest = max(len(part.encode()) for part in place.parts)
        return f"{disk_of(place)}; its names may have 255 bytes, and one of these has {longest}: choose a shorter one"
    try:
        facts = nearest.stat()
        try:
            owner = pwd.getpwuid(facts.st_uid).pw_name
        except KeyError:
            owner = str(facts.st_uid)
        return f"{nearest} belongs to {owner} (mode {facts.st_mode & 0o7777:o}): change its permissions"
    except OSError:
        return "Change its permissions"


def _nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists and is visible."""
    for place in (path, *path.parents):
        try:
            place.lstat()
        except OSError:
            continue
        return place
    return Path("/")


def bytes_text(count: int) -> str:
    """Return a size as people read it, such as 1.5 GiB."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {UNITS[unit]}" if unit == 0 else f"{value:.1f} {UNITS[unit]}"
