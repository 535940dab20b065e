"""`clusterkit logs` of a run on this machine."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from clusterkit.cli.actions.target import folder_of_runs
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.tail import MOST_BYTES, Tail, read_tail
from clusterkit.runs.status import find_run
from clusterkit.ui import output
from trainer.errors import RunError, UserError

POLL_SECONDS = 1.0
_BLOCK = 1 << 20

Which = tuple[bool, int | None, str | None]
"""Of a run's logs: what an attempt printed, or one of its ranks, or an engine server; main.log when none is meant."""


def show(
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    user: str | None,
    which: Which,
    *,
    lines: int,
    follow: bool,
) -> None:
    """Print the end of a log of a run of this machine, and with `follow` what comes."""
    run = find_run(folder_of_runs(fileroot), experiment, trial, user)
    numbers = run.attempt_numbers()
    _show(log_of(run, numbers[-1] if numbers else 0, *which), lines, follow)


def log_of(run: RunDirectory, attempt: int, console: bool, rank: int | None, engine: str | None) -> Path:
    """The file that is meant. Raises UserError for what is no name of a server."""
    if engine is not None:
        if "/" in engine or engine.startswith("."):
            raise UserError(f"--engine {engine}: give a server's name or number; clusterkit serve list shows them")
        return run.logs / "servers" / (f"server-{engine}.log" if engine.isdigit() else f"{engine}.log")
    if rank is not None:
        return run.logs / f"attempt_{attempt}" / f"rank_{rank}.log"
    return run.console(attempt) if console else run.logs / "main.log"


def _show(path: Path, lines: int, follow: bool) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            shown, end = 0, os.fstat(file.fileno()).st_size
            if lines:
                tail, shown = read_tail(file.fileno(), lines)
                write_tail(tail, path, lines)
                file.seek(shown)
            while follow or shown < end:
                if data := file.read(_BLOCK):
                    write(data)
                    shown += len(data)
                elif follow:
                    time.sleep(POLL_SECONDS)
                else:
                    return  # it was truncated meanwhile
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


def write_tail(tail: Tail, path: Path, lines: int) -> None:
    """Print the end of a log, and say where it is cut."""
    write(tail.text())
    if tail.cut:
        output.note(f"the last {lines} lines are longer than {MOST_BYTES >> 20} MB: this is their end. All: {path}")


def write(data: bytes) -> None:
    """Print bytes as they are."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
