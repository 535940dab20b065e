"""`clusterkit logs`: print the end of a log, and what comes."""

from __future__ import annotations

import sys
import time

from clusterkit.backends.base import Log, LogName
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run, selector_of
from clusterkit.cli.runoptions import RunOptions
from clusterkit.runs.log.tail import MOST_BYTES, read_tail
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output

POLL_SECONDS = 1.0
_BLOCK = 1 << 20


def show(
    run: RunOptions, hosts: HostOptions, which: tuple[bool, int | None, str | None], *, lines: int, follow: bool
) -> None:
    """Print a log.

    Args:
        run: which run.
        hosts: of the cluster, should it be on one.
        which: of its logs; fields of `LogName`.
        lines: so many of its last lines; 0 for all.
        follow: go on with what is added, until Ctrl-C.
    """
    selector, name = selector_of(run), LogName(*which)
    with open_backend(place_of_run(run, hosts=hosts), output.note) as backend:
        _show(backend.log(selector, name, patient=follow), lines, follow)


def _show(log: Log, lines: int, follow: bool) -> None:
    shown, end = 0, log.size()
    if lines:
        tail = read_tail(log.read, end, lines)
        _write(tail.text())
        shown = end
        if tail.cut:
            size = MOST_BYTES >> 20
            output.note(f"the last {lines} lines are longer than {size} MB: this is their end. All: {log.path}")
    while follow or shown < end:
        if data := log.read(shown, _BLOCK):
            _write(data)
            shown += len(data)
        elif follow:
            time.sleep(POLL_SECONDS)
        else:
            return  # it was truncated meanwhile


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
