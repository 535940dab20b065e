"""Open a log, with errors that say what to do."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO

from trainer.errors import RunError, UserError

BLOCK_BYTES = 1 << 18
"""A block fits into a processor's second-level cache, because it is searched several times."""


class MissingLogError(UserError):
    """The log does not exist, or not at this moment."""


def open_log(path: Path, *, pipe: bool = False) -> BinaryIO:
    """Open a log, with `pipe` also a named pipe. Raises the errors of LogReader.refresh."""
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or (pipe and stat.S_ISFIFO(mode))):
            kind = f"a folder: name the file, such as {path / 'main.log'}" if path.is_dir() else "no regular file"
            raise UserError(f"{path} is {kind}")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise MissingLogError(f"there is no log {path}: name an existing file with --log FILE") from None
    except PermissionError:
        raise UserError(f"{path} may not be read: become its owner, or ask for `chmod a+r {path}`") from None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> RunError:
    """Return the error of a log on a disk that fails."""
    return RunError(f"cannot read {path}: {error.strerror or error}. Check the disk or mount that it is on")
