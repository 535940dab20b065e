"""Where clusterkit keeps what it knows about clusters: inventories, host keys, passwords for sudo."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.disk import naming


def config_folder() -> Path:
    """$CLUSTERKIT_CONFIG, or clusterkit/ in $XDG_CONFIG_HOME or ~/.config. It need not exist."""
    if own := os.environ.get("CLUSTERKIT_CONFIG"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "clusterkit"


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; only its owner may read it. Missing folders are made, for the owner alone.

    Raises:
        OSError: it cannot be written; it names the path.

    """
    with naming(path):
        _write_private(path, text)


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def state_folder() -> Path:
    """Where logs go: $CLUSTERKIT_STATE, or ~/.local/state/clusterkit."""
    given = os.environ.get("CLUSTERKIT_STATE")
    return Path(given) if given else Path.home() / ".local" / "state" / "clusterkit"
