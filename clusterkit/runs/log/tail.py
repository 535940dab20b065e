"""The last lines of a file of any size, read from its end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

FIRST_BYTES = 128 * 1024
GROWTH = 8
MOST_BYTES = 16 << 20
"""If the lines are longer than this together, only their end is returned: nobody reads 16 MB on a screen."""

_CONTINUATION = bytes(range(0x80, 0xC0))


class Tail:
    """Decides which part of a file to read next, until its last lines are known.

    Args:
        size: bytes of the file.

    Attributes:
        cut: whether the lines are longer than MOST_BYTES and lack their beginning.
    """

    def __init__(self, size: int, count: int) -> None:
        self.cut = False
        self._count = count
        self._begin = size
        self._most = min(size, MOST_BYTES)
        self._pieces: list[bytes] = []
        self._lines = 0
        self._known = 0
        self._next = FIRST_BYTES

    def next_piece(self) -> tuple[int, int] | None:
        """Return offset and length of the next piece to read, or None."""
        if self._lines >= self._count or self._begin == 0 or self._known >= self._most:
            return None
        length = min(self._next, self._begin, self._most - self._known)
        return self._begin - length, length

    def add(self, piece: bytes) -> None:
        """Add the piece that `next_piece` returned. A shorter one means that the file was truncated meanwhile."""
        expected = self.next_piece()
        assert expected is not None
        begin, length = expected
        if len(piece) < length:
            self._pieces.clear()
            self._lines = 0
        if not self._pieces and piece.endswith(b"\n"):
            self._lines -= 1  # it ends the last line
        self._pieces.append(piece)
        self._lines += piece.count(b"\n")
        self._begin, self._known, self._next = begin, self._known + length, self._next * GROWTH

    def text(self) -> bytes:
        """Return the lines; the first one lacks its beginning if they are cut."""
        data = b"".join(reversed(self._pieces))
        end = len(data) - 1 if data.endswith(b"\n") else len(data)
        for _ in range(self._count):
            end = data.rfind(b"\n", 0, end)
            if end < 0:
                break
        self.cut = end < 0 and self._begin > 0
        # A character whose first bytes are cut off is dropped.
        return data[end + 1 :].lstrip(_CONTINUATION) if self.cut else data[end + 1 :]


def read_tail(read: Callable[[int, int], bytes], size: int, count: int) -> Tail:
    """Return the last lines of a file.

    Args:
        read: returns the piece at an offset and of a length; shorter only at the end of the file.
        size: bytes of the file.
    """
    tail = Tail(size, count)
    while (piece := tail.next_piece()) is not None:
        tail.add(read(*piece))
    return tail


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a text file, without trailing blank ones; none if it does not exist."""
    try:
        with path.open("rb") as file:

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            text = read_tail(read, file.seek(0, os.SEEK_END), count).text()
    except OSError:
        return []
    return text.decode("utf-8", errors="replace").rstrip().splitlines()


def failure_message(console: Path) -> str | None:
    """Return the message for the user (`error: …`) at the end of a trainer's output, or None."""
    lines = last_lines(console, 200)
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]) if starts else None
