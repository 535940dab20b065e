"""Servers that answer and judge for a run, registered as a file beside it: experiment and trial are all to agree on.

    FILEROOT/logs/USER/EXPERIMENT/judge-TRIAL.json
    {"model": "Qwen3-14B", "urls": ["http://10.0.0.5:30000", …], "pid": 4242, "host": "gpu03", "started": 1790000000.0}

Whoever starts servers writes it once they answer and removes it when they end; a run reads it at its start, and again
while it waits for servers that are gone, so that new ones at other addresses are found.
"""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.files import write_atomic


@dataclass(frozen=True, slots=True)
class Registered:
    """Servers of one model. model: the name that they serve it under. started: Unix seconds."""

    model: str
    urls: tuple[str, ...]
    pid: int
    host: str
    started: float


def registry_file(fileroot: str | Path, user: str, experiment: str, trial: str) -> Path:
    """Where the servers of a trial are registered."""
    root = Path(fileroot).expanduser().absolute()
    return root / "logs" / user / experiment / f"judge-{trial}.json"


def register(path: Path, model: str, urls: list[str]) -> Registered:
    """Write who serves; what was registered before is replaced. Raises OSError."""
    entry = Registered(model, tuple(urls), os.getpid(), platform.node(), time.time())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(entry), indent=1))
    return entry


def registered(path: Path) -> Registered | None:
    """Who serves, or None where nobody is registered, or what stands there cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return Registered(
            str(values["model"]),
            tuple(str(url) for url in values["urls"]),
            int(values["pid"]),
            str(values["host"]),
            float(values["started"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def unregister(path: Path, entry: Registered) -> None:
    """Remove the registration if it is still ours."""
    if registered(path) == entry:
        path.unlink(missing_ok=True)
