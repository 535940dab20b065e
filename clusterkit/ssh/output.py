"""Collect what a command prints, and report it line by line."""

from __future__ import annotations

from collections.abc import Callable


class Output:
    """Collects stdout and stderr. on_line: gets every line of both when it is complete, without the newline."""

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        self._on_line = on_line
        self._parts: dict[bool, list[bytes]] = {False: [], True: []}
        self._rest = {False: b"", True: b""}

    def __call__(self, is_stderr: bool, data: bytes) -> None:
        """Add bytes that have arrived."""
        self._parts[is_stderr].append(data)
        if self._on_line is None:
            return
        *lines, self._rest[is_stderr] = (self._rest[is_stderr] + data).split(b"\n")
        for line in lines:
            self._on_line(_text(line))

    def finish(self) -> None:
        """Report the last lines, which have no newline."""
        for is_stderr, rest in self._rest.items():
            if rest and self._on_line is not None:
                self._on_line(_text(rest))
            self._rest[is_stderr] = b""

    @property
    def stdout(self) -> str:
        """All of stdout."""
        return b"".join(self._parts[False]).decode(errors="replace")

    @property
    def stderr(self) -> str:
        """All of stderr."""
        return b"".join(self._parts[True]).decode(errors="replace")

    def last_lines(self, count: int = 5) -> str:
        """Return the last lines of stderr, or of stdout where stderr is empty."""
        return "\n".join((self.stderr.strip() or self.stdout.strip()).splitlines()[-count:])


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r")
