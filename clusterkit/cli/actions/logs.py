"""`clusterkit logs`: print the end of a log, and what comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.base import Log, LogName
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run, selector_of
from clusterkit.cli.runoptions import RunOptions
from clusterkit.common.text_plot import iso_time
from clusterkit.runs.log.lines import messages, plain
from clusterkit.runs.log.tail import MOST_BYTES, read_tail
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output

POLL_SECONDS = 1.0
_BLOCK = 1 << 20


def show(
    run: RunOptions,
    hosts: HostOptions,
    which: tuple[bool, int | None, str | None],
    *,
    lines: int,
    follow: bool,
    as_json: bool,
) -> None:
    """Print a log. which: of its logs; fields of `LogName`."""
    selector, name = selector_of(run), LogName(*which)
    with open_backend(place_of_run(run, hosts=hosts), output.note) as backend:
        log = backend.log(selector, name, patient=follow)
        written = JsonLines(log.path) if as_json else PlainBytes()
        _show(log, lines, follow, written.write)
        written.close()


class PlainBytes:
    """Prints a log as it is."""

    def write(self, data: bytes) -> None:
        """Print the bytes that came."""
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def close(self) -> None:
        """Nothing is held back."""


class JsonLines:
    """Prints the lines of a log as JSON: its path, the text, and level and time of a logger's message."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = str(path), b""

    def write(self, data: bytes) -> None:
        """Print the lines that are whole now."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._print(line)

    def close(self) -> None:
        """Print a last line without an end."""
        if self._rest:
            self._print(self._rest)

    def _print(self, line: bytes) -> None:
        text = plain(line)
        message = next(messages(text), None)
        time = None if message is None or message.time is None else iso_time(message.time)
        output.line_json({"log": self._path, "time": time, "level": message and message.level, "text": text})


def _show(log: Log, lines: int, follow: bool, write: Callable[[bytes], None]) -> None:
    shown, end = 0, log.size()
    if not end:
        output.note(f"{log.path} has nothing yet; how the run is doing: clusterkit status")
    if lines:
        tail = read_tail(log.read, end, lines)
        write(tail.text())
        shown = end
        if tail.cut:
            size = MOST_BYTES >> 20
            output.note(f"the last {lines} lines are longer than {size} MB: this is their end. All: {log.path}")
    while follow or shown < end:
        if data := log.read(shown, _BLOCK):
            write(data)
            shown += len(data)
        elif follow and log.size() < shown:
            output.note(f"{log.path} was cut short: from its beginning")
            shown = 0
        elif follow:
            time.sleep(POLL_SECONDS)
        else:
            return  # it was truncated meanwhile
