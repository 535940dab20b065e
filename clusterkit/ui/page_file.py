"""A page as a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainer.disk import file_failure
from trainer.errors import UserError


def write_page(page: str, path: Path) -> Path:
    """Write the page, whole or not at all, and give its absolute path.

    Raises:
        UserError: the path is a folder, lies in none, or may not be written.
        RunError: the disk is full.

    """
    path = path.absolute()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file, such as --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: make it, or name another file with --out")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    except OSError as error:
        raise file_failure(error, path, "name another file with --out") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # as any file that is made here, not mkstemp's private one
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise file_failure(error, path, "name another file with --out") from None
    return path
