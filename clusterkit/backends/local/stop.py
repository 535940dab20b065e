"""End a run whose trainer is a process of this machine."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from clusterkit.backends.stop import LiveRun
from clusterkit.runs.directory import RunDirectory, lock_holder, resume_hint
from clusterkit.runs.holder import holder_of
from clusterkit.runs.log.metrics import read_history
from trainer.errors import RunError


def process_run(run: RunDirectory) -> LiveRun:
    """A living run of processes of this machine."""

    def interrupt() -> None:
        if (found := _process(run)) is None:
            return
        # As Ctrl-C, which it tells from force: else it would take the trainer's death for a crash, should the kernel
        # kill it while it stops, and start it again.
        if (command := _holder(run, "launch.lock")) not in (None, found):
            send_signal(*command, signal.SIGINT)
        send_signal(*found, signal.SIGTERM)

    def kill() -> None:
        # Looked up first: a trainer that ends of its command's SIGTERM must not make that command look like it.
        found = _process(run)
        # Its command would take the trainer's end for a crash, and start it again.
        if command := _holder(run, "launch.lock"):
            send_signal(*command, signal.SIGTERM)
        if found is not None:
            send_signal(*found, signal.SIGKILL)

    def hint() -> str:
        killed = "its trainer was killed while it stopped; " if run.died_stopping else ""
        in_warmup = read_history(run.metrics).is_in_warmup
        return killed + resume_hint(run.has_recover_checkpoint, run.keeps_supervised, in_warmup)

    return LiveRun(
        run.name,
        interrupt,
        kill,
        alive=lambda: holder_of(run) is not None,
        resume_hint=hint,
        stuck=lambda: f"look at process {(_process(run) or ('', run.logs))[0]}",
        poll_seconds=0.2,
    )


def _process(run: RunDirectory) -> tuple[int, Path] | None:
    """The trainer's process, or that of the command that is about to start it; and the lock that it holds."""
    return _holder(run, "run.lock") or _holder(run, "launch.lock")


def _holder(run: RunDirectory, name: str) -> tuple[int, Path] | None:
    lock = run.logs / name
    holder = (lock_holder(lock) or "").removeprefix("process ")
    return (int(holder), lock) if holder.isdigit() else None


def send_signal(process: int, lock: Path, number: signal.Signals) -> None:
    """Send a signal to the process that holds a lock; one that has just ended is no error.

    Raises:
        RunError: it is somebody else's, or has its number on another machine or in another container.
    """
    if _is_another(process, lock):
        if lock_holder(lock) != f"process {process}":
            return  # it let go of the lock since it was looked up: it has just ended
        raise RunError(
            f"{lock} is held from another machine or container, where process {process} is another one than here: "
            "stop it there"
        )
    try:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    except PermissionError:
        raise RunError(f"process {process} belongs to another user: stop it as that user") from None


def _is_another(process: int, lock: Path) -> bool:
    """Whether a process of this machine is known not to have the file open."""
    try:
        wanted, entries = lock.stat(), list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:  # it has ended, or is another user's; or this system has no /proc
        return False
    for entry in entries:
        with suppress(OSError):
            if os.path.samestat(entry.stat(), wanted):
                return False
    return True
