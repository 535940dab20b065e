"""The folders of clusterkit's own files: inventories, host keys, passwords for sudo, logs."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.disk import naming
from trainer.files import write_atomic


def config_folder() -> Path:
    """Return $CLUSTERKIT_CONFIG, or clusterkit/ in $XDG_CONFIG_HOME or ~/.config. It may not exist."""
    if own := os.environ.get("CLUSTERKIT_CONFIG"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "clusterkit"


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically, readable for its owner alone. Missing folders are made likewise.

    Raises:
        OSError: the file cannot be written; the error names the path.
    """
    with naming(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, text, mode=0o600)


def state_folder() -> Path:
    """Return the folder of logs: $CLUSTERKIT_STATE, or ~/.local/state/clusterkit."""
    given = os.environ.get("CLUSTERKIT_STATE")
    return Path(given) if given else Path.home() / ".local" / "state" / "clusterkit"
