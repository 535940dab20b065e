"""A page as a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from trainer.errors import RunError, UserError


def write_page(page: str, path: Path) -> Path:
    """Write the page, whole or not at all, and give its absolute path.

    Raises:
        UserError: the path is a folder, or lies in none.
        RunError: it cannot be written.

    """
    path = path.absolute()
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file, such as --out {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}: make it, or name another file with --out")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    except OSError as error:
        raise _refused(path, error) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)  # as any file that is made here, not mkstemp's private one
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise _refused(path, error) from None
    return path


def _refused(path: Path, error: OSError) -> RunError:
    return RunError(f"{path} cannot be written ({error.strerror}): name another file with --out")
