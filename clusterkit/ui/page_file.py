"""Write a page to a file."""

from __future__ import annotations

from pathlib import Path

from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import write_atomic


def write_page(page: str, path: Path) -> Path:
    """Write a page, whole or not at all; return its absolute path.

    Raises:
        UserError: the path is a folder, is in no folder, or may not be written.
        RunError: the disk is full.
    """
    path = path.absolute()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file, such as --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: make it, or name another file with --out")
    with file_failures(path, "name another file with --out"):
        write_atomic(path, page)
    return path
