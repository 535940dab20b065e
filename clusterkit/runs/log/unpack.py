"""Decompress logs and decode UTF-16 and UTF-32, by their content, not by their name."""

from __future__ import annotations

import bz2
import codecs
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import zstandard

SNIFFED_BYTES = 512
"""The first bytes, which show how a file is packed; a shorter file is complete."""

MOST_BYTES = 1 << 20
"""Largest piece of text, however much a few compressed bytes hold."""

MOST_LAYERS = 3
_ZSTD_BYTES = 4096
"""Compressed bytes at a time for zstd, whose decompressor cannot limit its output."""

_Expanding = Generator[bytes, None, bytes]


class _Damaged(Exception):  # noqa: N818 (never leaves this module)
    pass


def packing_of(begin: bytes) -> str:
    """Return how a file is packed, by its first bytes: gzip, zstd, xz, bzip2, utf-16-le …; "" for plain text."""
    for name, marks in _MARKS:
        if begin.startswith(marks):
            return name
    pairs = begin[: len(begin) & ~1]
    if len(pairs) >= _LEAST_PAIRS:
        # Most letters of a log are ASCII: in UTF-16 every other byte of it is zero.
        low, high = (pairs[offset::2].count(0) * 2 / len(pairs) for offset in (0, 1))
        if max(low, high) > _ZERO_SHARE and min(low, high) < 1 - _ZERO_SHARE:
            return "utf-16-be" if low > high else "utf-16-le"
    return ""


class Unpacker:
    """Turns the bytes of a log into text in UTF-8.

    `packings` lists the formats, the outermost first; `problem` says why not all could be read, or is empty.
    """

    def __init__(self, layer: int = 0) -> None:
        self.packings: tuple[str, ...] = ()
        self.problem = ""
        self._layer = layer
        self._held: bytes | None = b""  # until the format is known
        self._codec: _Compressed | _Encoded | None = None
        self._inner: Unpacker | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the text of the next bytes."""
        if self._held is not None:
            self._held += data
            if len(self._held) >= SNIFFED_BYTES:
                yield from self._begin()
        else:
            yield from self._text(data)

    def end(self) -> Iterator[bytes]:
        """Yield the rest: no bytes follow."""
        yield from self._begin()
        if isinstance(self._codec, _Encoded):
            yield self._codec.end()
        if isinstance(self._codec, _Compressed) and self._codec.unfinished and not self.problem:
            self.problem = (
                f"its {self.packings[0]} data end in the middle (cut off, or still being written): "
                "what comes before is shown"
            )
        if self._inner is not None:
            yield from self._inner.end()
            self._learn(self._inner)

    def _begin(self) -> Iterator[bytes]:
        if self._held is None:
            return
        held, self._held = self._held, None
        name = packing_of(held)
        if name and self._layer < MOST_LAYERS:
            self.packings = (name,)
            if name in _COMPRESSED:
                self._codec, self._inner = _Compressed(*_COMPRESSED[name]), Unpacker(self._layer + 1)
            else:
                self._codec = _Encoded(name)
        yield from self._text(held)

    def _text(self, data: bytes) -> Iterator[bytes]:
        if self._codec is None:
            yield data
            return
        if self.problem:
            return
        try:
            for piece in self._codec.feed(data):
                if self._inner is None:
                    yield piece
                else:
                    yield from self._inner.feed(piece)
        except _Damaged as error:
            self.problem = f"its {self.packings[0]} data are damaged ({error}): what comes before is shown"
        if self._inner is not None:
            self._learn(self._inner)

    def _learn(self, inner: Unpacker) -> None:
        self.packings = self.packings[:1] + inner.packings
        self.problem = self.problem or inner.problem


class _Compressed:
    """Members of a compressed file, one after another."""

    def __init__(self, make: Callable[[], Any], expand: Callable[[Any, bytes], _Expanding]) -> None:
        self._make, self._expand = make, expand
        self._member: Any = None

    @property
    def unfinished(self) -> bool:
        return self._member is not None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._member is None:
                data = data.lstrip(b"\0")  # padding between members
                if not data:
                    return
                self._member = self._make()
            try:
                data = yield from self._expand(self._member, data)
            except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
                raise _Damaged(error) from None
            if self._member.eof:
                self._member = None


class _Encoded:
    """Text in UTF-16 or UTF-32."""

    def __init__(self, encoding: str) -> None:
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield self._decoder.decode(data).encode()

    def end(self) -> bytes:
        return self._decoder.decode(b"", final=True).encode()


def _inflate(member: Any, data: bytes) -> _Expanding:
    piece = b""
    while (data or len(piece) == MOST_BYTES) and not member.eof:
        piece = member.decompress(data, MOST_BYTES)
        data = member.unconsumed_tail
        yield piece
    return bytes(member.unused_data)


def _expand(member: Any, data: bytes) -> _Expanding:
    yield member.decompress(data, MOST_BYTES)
    while not member.eof and not member.needs_input:
        yield member.decompress(b"", MOST_BYTES)
    return bytes(member.unused_data)


def _expand_zstd(member: Any, data: bytes) -> _Expanding:
    for start in range(0, len(data), _ZSTD_BYTES):
        yield member.decompress(data[start : start + _ZSTD_BYTES])
        if member.eof:
            return bytes(member.unused_data) + data[start + _ZSTD_BYTES :]
    return b""


_COMPRESSED: dict[str, tuple[Callable[[], Any], Callable[[Any, bytes], _Expanding]]] = {
    "gzip": (lambda: zlib.decompressobj(31), _inflate),
    "zstd": (lambda: zstandard.ZstdDecompressor().decompressobj(), _expand_zstd),
    "xz": (lzma.LZMADecompressor, _expand),
    "bzip2": (bz2.BZ2Decompressor, _expand),
}
_MARKS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    ("gzip", (b"\x1f\x8b\x08",)),
    ("zstd", (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + n, 0x2A, 0x4D, 0x18]) for n in range(16)))),
    ("xz", (b"\xfd7zXZ\0",)),
    ("bzip2", tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))),
    ("utf-32", (b"\xff\xfe\0\0", b"\0\0\xfe\xff")),
    ("utf-16", (b"\xff\xfe", b"\xfe\xff")),
)
_LEAST_PAIRS = 16
_ZERO_SHARE = 0.7
