"""Messages for an operating system's error about a file: path, disk, and what to do."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from clusterkit.hosts.folders import config_folder, state_folder
from clusterkit.runs.directory import FILEROOT
from trainer.assets import cache_root
from trainer.disk import FULL, LOST, REFUSED, file_failure, is_full
from trainer.errors import UserError


def explain_file_error(error: OSError) -> UserError | None:
    """Return the message for an error; None if it is not about a file (but a network or a process)."""
    if error.errno not in (*FULL, *LOST, *REFUSED):
        return None
    if error.filename is not None:
        place = Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, str | bytes) else Path.cwd()
        return file_failure(error, place, _instead(place))
    if error.errno not in (*FULL, errno.EROFS, errno.EIO, errno.ESTALE):
        return None
    # The error of a write has no path: look for the disk that is full.
    full = next((place for place in _places() if error.errno in FULL and is_full(place)), Path.cwd())
    return file_failure(error, full, _instead(full))


def _places() -> dict[Path, str]:
    """Return the folders that clusterkit writes to, with how to choose another."""
    places = {
        **_output_file(),
        config_folder(): "set CLUSTERKIT_CONFIG to another folder",
        state_folder(): "set CLUSTERKIT_STATE to another folder",
        cache_root(): "set CLUSTERKIT_CACHE to another folder",
        Path(tempfile.gettempdir() if _has_temporary() else "/tmp"): "set TMPDIR to another folder",
        Path.cwd(): FILEROOT,
    }
    return {place.absolute(): instead for place, instead in places.items()}


def _output_file() -> dict[Path, str]:
    """Return the file that standard output goes to; empty where that is none, or cannot be told."""
    try:
        is_file = stat.S_ISREG(os.fstat(1).st_mode)
        return {Path("/proc/self/fd/1").readlink(): "send the output to another file"} if is_file else {}
    except OSError:
        return {}


def _has_temporary() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # no temporary folder is writable
        return False
    return True


def _instead(place: Path) -> str:
    found = [
        instead
        for folder, instead in _places().items()
        if place.is_relative_to(folder) and folder != Path.cwd() and not _is_user_s_own(place, folder)
    ]
    return found[0] if found else "choose another place"


def _is_user_s_own(place: Path, folder: Path) -> bool:
    """Whether a path lies below the temporary folder under a name that somebody chose: TMPDIR does not move it."""
    names = place.relative_to(folder).parts
    is_temporary = _has_temporary() and folder == Path(tempfile.gettempdir()).absolute()
    return is_temporary and bool(names) and not names[0].startswith(("tmp", "clusterkit"))
