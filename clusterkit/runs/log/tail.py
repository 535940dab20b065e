"""The last lines of a file, read from its end, however long the file or its lines are."""

from __future__ import annotations

from collections.abc import Callable

FIRST_BYTES = 128 * 1024
GROWTH = 8
MOST_BYTES = 16 << 20
"""Of lines that are longer than this together, the end is given: nobody reads 16 MB on a screen."""

_CONTINUATION = bytes(range(0x80, 0xC0))


class Tail:
    """Says which part of a file to read next, until its last lines are known.

    size: bytes of the file. count: lines that are wanted. cut: whether they are longer than MOST_BYTES, and lack their
    beginning.
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

    def wanted(self) -> tuple[int, int] | None:
        """Offset and length of the piece that is missing, or None."""
        if self._lines >= self._count or self._begin == 0 or self._known >= self._most:
            return None
        length = min(self._next, self._begin, self._most - self._known)
        return self._begin - length, length

    def add(self, piece: bytes) -> None:
        """Take in the piece that was wanted last. A shorter one says that the file was truncated meanwhile."""
        wanted = self.wanted()
        assert wanted is not None
        begin, length = wanted
        if len(piece) < length:
            self._pieces.clear()
            self._lines = 0
        if not self._pieces and piece.endswith(b"\n"):
            self._lines -= 1  # it ends the last line, and begins none
        self._pieces.append(piece)
        self._lines += piece.count(b"\n")
        self._begin, self._known, self._next = begin, self._known + length, self._next * GROWTH

    def text(self) -> bytes:
        """The lines. Their first one lacks its beginning where they are cut."""
        data = b"".join(reversed(self._pieces))
        end = len(data) - 1 if data.endswith(b"\n") else len(data)
        for _ in range(self._count):
            end = data.rfind(b"\n", 0, end)
            if end < 0:
                break
        self.cut = end < 0 and self._begin > 0
        # A letter of several bytes that begins before the end is left out as a whole.
        return data[end + 1 :].lstrip(_CONTINUATION) if self.cut else data[end + 1 :]


def read_tail(read: Callable[[int, int], bytes], size: int, count: int) -> Tail:
    """The last lines of a file.

    Args:
        read: gives a piece of it, from an offset on and of a length; shorter only at its end.
        size: bytes of the file.
        count: lines that are wanted.

    """
    tail = Tail(size, count)
    while (wanted := tail.wanted()) is not None:
        tail.add(read(*wanted))
    return tail
