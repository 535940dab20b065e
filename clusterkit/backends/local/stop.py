"""End a training of this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from clusterkit.runs.directory import RunDirectory, lock_holder, resume_hint
from clusterkit.runs.holder import holder_of
from trainer.errors import RunError

POLL_SECONDS = 0.2


def stop_process(run: RunDirectory, *, deadline: float, force: bool, say: Callable[[str], None]) -> str:
    """End a run whose trainer is a process of this machine; how that went, as a sentence.

    Args:
        run: it is alive.
        deadline: seconds until it is ended by force.
        force: at once.
        say: told what is being waited for.

    Raises:
        RunError: it cannot be ended.

    """
    name = f"{run.experiment}/{run.trial}"
    if not force:
        process = _process(run)
        if process is not None:
            _send(process, signal.SIGTERM)
        say(f"{name} writes a recover checkpoint and ends; by force after {deadline:.0f} s")
        if _ended(run, deadline):
            return f"{name} is stopped; {resume_hint(run.has_recover_checkpoint)}"
    # Looked up first: a trainer that ends of its command's SIGTERM must not make that command look like the trainer.
    process = _process(run)
    # Its command would take the trainer's end for a crash, and start it again.
    if command := _pid(run, "launch.lock"):
        _send(command, signal.SIGTERM)
    if process is not None:
        _send(process, signal.SIGKILL)
    if not _ended(run, deadline):
        raise RunError(f"{name} does not end: look at process {_process(run)}")
    return f"{name} was ended by force; {resume_hint(run.has_recover_checkpoint)}"


def _process(run: RunDirectory) -> int | None:
    """The trainer's process, or that of the command that is about to start it."""
    return _pid(run, "run.lock") or _pid(run, "launch.lock")


def _pid(run: RunDirectory, name: str) -> int | None:
    holder = (lock_holder(run.logs / name) or "").removeprefix("process ")
    return int(holder) if holder.isdigit() else None


def _send(process: int, number: signal.Signals) -> None:
    try:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    except PermissionError:
        raise RunError(f"process {process} belongs to another user: stop it as that user") from None


def _ended(run: RunDirectory, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while holder_of(run):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True
