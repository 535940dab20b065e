"""The code that goes to hosts: the files of trainer/, evaluation/ and presets/, and archives of files."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from trainer.errors import UserError

NODE_SIDE = ("trainer", "evaluation", "presets")
"""Folders that go into the container."""


def node_files() -> list[tuple[str, bytes]]:
    """Return relative path and content of every file, sorted by path.

    Raises:
        UserError: the installation is incomplete.
    """
    found = []
    for package in NODE_SIDE:
        root = _folder_of(package)
        paths = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        found += [(f"{package}/{path.relative_to(root).as_posix()}", path.read_bytes()) for path in paths]
    return sorted(found)


def archive(entries: Iterable[tuple[str, bytes]]) -> bytes:
    """Pack files (path, content) as tar.gz; the same files give the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), compresslevel=6, mtime=0)


def content_of(entries: Iterable[tuple[str, bytes]], *more: str) -> str:
    """Return the SHA-256 (64 hexadecimal digits) of files with their paths and of further texts."""
    hashed = hashlib.sha256("".join(f"{text}\0" for text in more).encode())
    for name, data in entries:
        hashed.update(f"{name}\0{len(data)}\0".encode())
        hashed.update(data)
    return hashed.hexdigest()


def _folder_of(package: str) -> Path:
    """Find a folder beside clusterkit; installed presets are inside it."""
    inside = Path(__file__).parents[1]
    for root in (inside.parent / package, inside / f"_{package}"):
        if root.is_dir():
            return root
    raise UserError(f"the {package} package is not installed beside clusterkit; install clusterkit again")
