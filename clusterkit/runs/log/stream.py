"""Read logs that have no position to resume from: compressed ones, other encodings, and pipes."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from pathlib import Path
from typing import BinaryIO

from clusterkit.runs.log.files import BLOCK_BYTES, open_log, unreadable
from clusterkit.runs.log.scan import LogScanner
from clusterkit.runs.log.unpack import Unpacker
from clusterkit.runs.log.view import SAMPLE_BYTES, LogView, Sample
from trainer.errors import UserError

STDIN = "-"


class StreamText:
    """The text of a log so far: its history, its beginning, and the last `keep` bytes."""

    def __init__(self, keep: int) -> None:
        self.scanner = LogScanner()
        self.unpacker = Unpacker()
        self.begin = b""
        self.kept = bytearray()
        self.skipped_bytes = 0
        self.skipped_lines = 0
        self.raw_bytes = 0
        self._keep = max(keep, SAMPLE_BYTES)

    def take(self, raw: bytes) -> None:
        """Read the next bytes of the file."""
        self.raw_bytes += len(raw)
        for text in self.unpacker.feed(raw):
            self._take(text)

    def end(self) -> None:
        """Finish: no bytes follow."""
        for text in self.unpacker.end():
            self._take(text)
        self.scanner.feed(b"\n")  # the last line is complete

    def _take(self, text: bytes) -> None:
        self.scanner.feed(text)
        if len(self.begin) < SAMPLE_BYTES:
            self.begin += text[: SAMPLE_BYTES - len(self.begin)]
        self.kept += text
        if len(self.kept) >= 2 * self._keep:
            self._forget()

    def _forget(self) -> None:
        # Keep whole lines, unless one line is longer than all that is kept.
        newline = self.kept.find(b"\n", len(self.kept) - self._keep)
        cut = newline + 1 or len(self.kept) - self._keep
        self.skipped_bytes += cut
        self.skipped_lines += self.kept.count(b"\n", 0, cut)
        del self.kept[:cut]

    def sample(self) -> Sample:
        """Return the text's beginning and end."""
        return Sample(self.begin, bytes(self.kept[-SAMPLE_BYTES:]))


class StreamReader:
    """Reads one log from its beginning: a compressed file, a pipe, or standard input (`-`).

    Args:
        keep: size of the text's end to keep, as `text`.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.path = path if str(path) == STDIN else path.expanduser().absolute()
        self.text = StreamText(keep)
        self._keep = keep
        self._pipe: BinaryIO | None = None
        self._ended = False
        self._modified = 0.0
        self._news = 0
        self._known: tuple[int, int, float] | None = None

    def refresh(self, seconds: float | None = None) -> LogView:
        """Read a file, or a pipe to its end or for some seconds. Raises the errors of LogReader.refresh."""
        self._news = 0
        try:
            if self._pipe is None:
                self._open()
            if self._pipe is not None and not self._ended:
                self._read_pipe(self._pipe, seconds)
        except OSError as error:
            raise unreadable(self.path, error) from error
        text = self.text
        archive = bool({"gzip", "zstd", "xz", "bzip2"} & set(text.unpacker.packings)) and not text.unpacker.problem
        notes = [f"read as {' in '.join(reversed(text.unpacker.packings))}"] if text.unpacker.packings else []
        notes += [text.unpacker.problem] if text.unpacker.problem else []
        return LogView(
            self.path,
            text.scanner.history,
            text.raw_bytes,
            self._modified,
            self._news,
            time.time(),
            text.sample(),
            tuple(notes),
            closed=self._ended or (archive and self._pipe is None),
        )

    def _open(self) -> None:
        """Open a pipe; read a file if it has changed."""
        if str(self.path) == STDIN:
            self._pipe = _standard_input()
            return
        file = open_log(self.path, pipe=True)
        info = os.fstat(file.fileno())
        if stat.S_ISFIFO(info.st_mode):
            self._pipe = file
            return
        with file:
            known = info.st_ino, info.st_size, info.st_mtime
            if known != self._known:
                self.text, self._known, self._modified = StreamText(self._keep), known, info.st_mtime
                while block := file.read(BLOCK_BYTES):
                    self.text.take(block)
                self.text.end()
                self._news = self.text.raw_bytes

    def _read_pipe(self, pipe: BinaryIO, seconds: float | None) -> None:
        until = None if seconds is None else time.monotonic() + seconds
        while until is None or (left := until - time.monotonic()) > 0:
            if until is not None and not select.select([pipe], [], [], left)[0]:
                return
            self._modified = time.time()
            block = os.read(pipe.fileno(), BLOCK_BYTES)
            if not block:
                self._ended = True
                self.text.end()
                return
            self._news += len(block)
            self.text.take(block)


def _standard_input() -> BinaryIO:
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("--log - reads standard input, and it is closed: `… | clusterkit … --log -`")
    if sys.stdin.isatty():
        raise UserError("--log - reads standard input, and that is the terminal: `… | clusterkit … --log -`")
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
