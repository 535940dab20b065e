"""End a run whose trainer is a process of this machine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from clusterkit.backends.stop import LiveRun
from clusterkit.runs.directory import RunDirectory, lock_holder, resume_hint
from clusterkit.runs.holder import holder_of
from trainer.errors import RunError


def process_run(run: RunDirectory) -> LiveRun:
    """A living run of processes of this machine."""

    def interrupt() -> None:
        if (process := _process(run)) is not None:
            send_signal(process, signal.SIGTERM)

    def kill() -> None:
        # Looked up first: a trainer that ends of its command's SIGTERM must not make that command look like it.
        process = _process(run)
        # Its command would take the trainer's end for a crash, and start it again.
        if command := _pid(run, "launch.lock"):
            send_signal(command, signal.SIGTERM)
        if process is not None:
            send_signal(process, signal.SIGKILL)

    return LiveRun(
        f"{run.experiment}/{run.trial}",
        interrupt,
        kill,
        alive=lambda: holder_of(run) is not None,
        resume_hint=lambda: resume_hint(run.has_recover_checkpoint, run.keeps_supervised),
        stuck=lambda: f"look at process {_process(run)}",
        poll_seconds=0.2,
    )


def _process(run: RunDirectory) -> int | None:
    """The trainer's process, or that of the command that is about to start it."""
    return _pid(run, "run.lock") or _pid(run, "launch.lock")


def _pid(run: RunDirectory, name: str) -> int | None:
    holder = (lock_holder(run.logs / name) or "").removeprefix("process ")
    return int(holder) if holder.isdigit() else None


def send_signal(process: int, number: signal.Signals) -> None:
    """Send a signal to a process of this machine; one that has just ended is no error.

    Raises:
        RunError: it is somebody else's.
    """
    try:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    except PermissionError:
        raise RunError(f"process {process} belongs to another user: stop it as that user") from None
