"""An operating system's error about a file of ours that nobody has put into words yet: path, disk and way out."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from clusterkit.hosts.folders import config_folder, state_folder
from clusterkit.runs.directory import FILEROOT
from trainer.assets import cache_root
from trainer.disk import FULL, LOST, REFUSED, file_failure, is_full
from trainer.errors import UserError


def in_words(error: OSError) -> UserError | None:
    """What to tell of it; None where it is not about a file (a network's, a process's)."""
    if error.errno not in (*FULL, *LOST, *REFUSED):
        return None
    if error.filename is not None:
        place = Path(os.fsdecode(error.filename)).absolute() if isinstance(error.filename, str | bytes) else Path.cwd()
        return file_failure(error, place, _instead(place))
    if error.errno not in (*FULL, errno.EROFS, errno.EIO, errno.ESTALE):
        return None
    # A write says what is wrong, not where: it is where nothing fits.
    full = next((place for place in _places() if error.errno in FULL and is_full(place)), Path.cwd())
    return file_failure(error, full, _instead(full))


def _places() -> dict[Path, str]:
    """Folders that we write to, and what chooses another."""
    places = {
        config_folder(): "set CLUSTERKIT_CONFIG to another folder",
        state_folder(): "set CLUSTERKIT_STATE to another folder",
        cache_root(): "set CLUSTERKIT_CACHE to another folder",
        Path(tempfile.gettempdir() if _has_temporary() else "/tmp"): "set TMPDIR to another folder",
        Path.cwd(): FILEROOT,
    }
    return {place.absolute(): instead for place, instead in places.items()}


def _has_temporary() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # no folder for temporary files can be written
        return False
    return True


def _instead(place: Path) -> str:
    found = [instead for folder, instead in _places().items() if place.is_relative_to(folder) and folder != Path.cwd()]
    return found[0] if found else "choose another place"
