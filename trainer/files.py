"""Atomic files: written beside their place, synced and renamed, so that a reader sees all of a file or nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.disk import naming
from trainer.errors import UserError

LFS_MARK = b"version https://git-lfs.github.com/spec/"
"""First bytes of the pointer that git clone leaves in place of a large file where Git LFS is missing."""


def refuse_pointer(path: Path) -> None:
    """Raise UserError where a file is a Git LFS pointer. OSError: it cannot be read."""
    with path.open("rb") as stream:
        if stream.read(len(LFS_MARK)) == LFS_MARK:
            raise UserError(
                f"{path} is a Git LFS pointer, not the file itself: run git lfs pull in the clone it came from"
            )


def write_atomic(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace what `path` has, durably; mode: of the file, less the umask. Raises OSError, which names the path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file, behind one that was cut off where it ends with such. Raises OSError."""
    with path.open("ab") as file:
        file.write(b"\n" * is_torn(path) + line.encode() + b"\n")


def is_torn(path: Path) -> bool:
    """Whether the last line of a text file was cut off, by a kill or a full disk. Raises OSError."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def sync(path: Path) -> None:
    """Make a file's content, or renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make every file below `folder` durable."""
    for path in (*(path for path in folder.rglob("*") if path.is_file()), folder):
        sync(path)


def replace_tree(temporary: Path, final: Path) -> None:
    """Give a folder that is complete and durable its name, in place of one that has it; durably."""
    remove_tree(final)
    temporary.rename(final)
    sync(final.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder, if it is there, in one rename: a kill leaves it whole or gone, never damaged."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def last_records(path: Path) -> list[dict[str, Any]]:
    """The whole JSON objects in the last 256 KiB of a JSON-lines file; none where there is no file."""
    try:
        with path.open("rb") as file:
            start = max(file.seek(0, os.SEEK_END) - (1 << 18), 0)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 :]
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        with suppress(ValueError):  # torn by a kill
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tree_bytes(folder: Path) -> int:
    """Size of all files below `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def disk_error(error: BaseException) -> OSError | None:
    """The operating system's error behind an exception, through the wrappers of DCP, torch and safetensors."""
    seen: list[BaseException] = [error]
    while seen:
        one = seen.pop()
        if isinstance(one, OSError):
            return one
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):
            seen.extend(f[0] if isinstance(f, tuple) else f for f in failures.values())
        seen.extend(e for e in (one.__cause__, one.__context__) if e is not None)
        # Native writers report a short write by text alone.
        text = str(one)
        if any(sign in text for sign in ("No space left", "file write failed", "unexpected pos")):
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return None


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
