"""Processes that a killed host of a server has left behind, and that still hold GPU memory: found and ended.

The kernel ends a server with its guard, but not the processes that the server has started. All of them carry a mark in
their environment, so they are found whatever their name and parent are now.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from trainer.engines.process import ServerStartError
from trainer.serving import registry

log = logging.getLogger(__name__)

MARK = "CLUSTERKIT_SERVER"
GRACE_SECONDS = 6.0
"""How long they may take to end when asked to; then they are killed."""
END_SECONDS = 30.0
LOOK_SECONDS = 0.1


def mark(folder: Path, name: str) -> dict[str, str]:
    """Variable for the environment of a server. folder: folder of the registrations."""
    return {MARK: str(folder.absolute() / name)}


def leftovers(folder: Path, name: str) -> list[int]:
    """Ids of processes on this machine that belong to this server of the run, and to no running host."""
    marker = f"{MARK}={mark(folder, name)[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # it ended meanwhile, or is another user's
                if marker in (entry / "environ").read_bytes().split(b"\0") and not _kept(int(entry.name)):
                    found.append(int(entry.name))
    return sorted(found)


async def end_leftovers(folder: Path, name: str) -> int:
    """End the server's orphans; returns how many there were, once the last has gone and freed its memory.

    Raises:
        ServerStartError: some cannot be ended.
    """
    first = left = await asyncio.to_thread(leftovers, folder, name)
    if not left:
        return 0
    log.warning("%s: processes of its earlier host are still there and are ended: %s", name, _numbers(left))
    began = time.monotonic()
    _signal(left, signal.SIGTERM)
    while left:
        waited = time.monotonic() - began
        if waited > END_SECONDS:
            raise ServerStartError(
                f"{name}: processes of its earlier host hold its GPUs and cannot be ended: {_numbers(left)}. See what "
                "they wait for (ps -o stat,wchan), or restart the machine"
            )
        if waited > GRACE_SECONDS:
            _signal(left, signal.SIGKILL)
        await asyncio.sleep(LOOK_SECONDS)
        left = await asyncio.to_thread(leftovers, folder, name)
    return len(first)


def _kept(pid: int) -> bool:
    """Whether a running host is among a process's ancestors."""
    while pid > 1:
        if registry.process_runs(pid):
            return True
        pid = _parent(pid)
    return False


def _parent(pid: int) -> int:
    try:
        # "PID (name) state parent …", and the name may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _numbers(pids: list[int]) -> str:
    return ", ".join(map(str, pids))
