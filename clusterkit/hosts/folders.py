"""The folders of clusterkit's own files: inventories, host keys, passwords for sudo, logs."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.disk import naming


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def state_folder() -> Path:
    """Return the folder of logs: $CLUSTERKIT_STATE, or ~/.local/state/clusterkit."""
    given = os.environ.get("CLUSTERKIT_STATE")
    return Path(given) if given else Path.home() / ".local" / "state" / "clusterkit"
