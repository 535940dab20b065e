"""console.log: what a trainer printed, and the message for the user at its end."""

from __future__ import annotations

import os
from pathlib import Path


def failure_message(console: Path) -> str | None:
    """The message for the user that the trainer left at the end of its output (`error: …`), if it did."""
    lines = last_lines(console, 200)
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]) if starts else None


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file, without trailing blank ones; none where it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - 65536, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:]
