"""Runs a command in a process group of its own and ends all of it with itself: `guard.py PARENT GRACE COMMAND…`.

An inference server starts processes of its own; a trainer that is killed can end none of them. The guard stands in
between: it gets SIGTERM from the kernel when the trainer dies, and the server gets SIGKILL when the guard dies.
It runs as a script without the package, so that it starts fast, and its exit code is the command's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_TRACKER = "multiprocessing.resource_tracker"
_TRACKER_SECONDS = 2.0
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main(parent: int, grace: float, command: list[str]) -> int:
    """Run the command until it ends or the guard is told to end. grace: seconds between SIGTERM and SIGKILL."""
    warned: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: warned.append(received))
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel was asked
        return 1
    try:
        guarded = functools.partial(_killed_with, os.getpid())
        server = subprocess.Popen(command, start_new_session=True, preexec_fn=guarded)  # noqa: PLW1509
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    deadline = 0.0
    while True:
        try:
            code = server.wait(0.1)
        except subprocess.TimeoutExpired:
            if warned and not deadline:
                deadline = time.monotonic() + grace
                server.terminate()  # it ends its own processes in order; those that it leaves are killed below
            elif warned and time.monotonic() > deadline:
                _kill_group(server.pid)
        else:
            _kill_group(server.pid)  # whatever it started
            return code if code >= 0 else 128 - code


def _killed_with(guard: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != guard:  # it was killed before the kernel was asked
        os._exit(1)


def die_with_parent(number: int) -> None:
    """Have the kernel send this process the signal when the one that started it dies."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, number)


def _kill_group(group: int) -> None:
    """Kill all of a process group, last of all Python's resource trackers.

    Once the others are dead they remove the shared memory that these have left, hundreds of megabytes of a server.
    """
    members = _members(group)
    if _TRACKER in members.values():
        for pid, kind in members.items():
            if kind != _TRACKER:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _TRACKER_SECONDS
        while _TRACKER in _members(group).values() and time.monotonic() < deadline:
            time.sleep(0.02)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> dict[int, str]:
    """Processes of a group that have not ended, by number; those that are Python's resource trackers are named so."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            state, _, its_group = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state != b"Z":
                is_tracker = _TRACKER.encode() in (entry / "cmdline").read_bytes()
                found[int(entry.name)] = _TRACKER if is_tracker else ""
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
