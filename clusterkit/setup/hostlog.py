"""One log file a host: the title of every action and all that it printed, with secrets masked."""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

from clusterkit.hosts.folders import state_folder
from clusterkit.setup.model import LAST_LINES

KEPT_RUNS = 20


def new_log_folder(cluster: str, command: str) -> Path:
    """Make a folder for the logs of one command, remove the oldest beyond 20, and return it."""
    parent = state_folder() / cluster / "logs"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = parent / f"{stamp}-{command}{suffix}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        break
    old = sorted(path for path in parent.iterdir() if path.is_dir())[:-KEPT_RUNS]
    for path in old:
        for file in path.glob("*.log"):
            file.unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()
    return folder


class HostLog:
    """Append-only log of one host. `secrets` are masked wherever they appear."""

    def __init__(self, folder: Path, host: str, secrets: tuple[str, ...] = ()) -> None:
        self.path = folder / f"{host.replace('/', '_')}.log"
        # The longest first: one may be a part of another.
        self.secrets = tuple(sorted({secret for secret in secrets if secret}, key=len, reverse=True))
        self.tail: deque[str] = deque(maxlen=LAST_LINES)
        self._file = os.fdopen(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", buffering=1)

    def masked(self, text: str) -> str:
        """Return the text with its secrets masked."""
        for secret in self.secrets:
            text = text.replace(secret, "********")
        return text

    def line(self, text: str) -> None:
        """Write a line with its time."""
        text = self.masked(text).rstrip("\n")
        self.tail.append(text)
        stamp = time.strftime("%H:%M:%S")
        self._file.write("".join(f"{stamp} {part}\n" for part in text.split("\n")))

    def heading(self, text: str) -> None:
        """Write a heading, and begin a new tail."""
        self.line(f"== {text}")
        self.tail.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
