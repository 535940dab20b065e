"""Read logs of several GB repeatedly: only what was appended, also between invocations.

Inode and first bytes identify a log. So one that was rotated (`main.log.1`) is read to its end before its successor,
and one that was replaced is read anew.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from clusterkit.hosts.folders import state_folder
from clusterkit.runs.log.files import BLOCK_BYTES, MissingLogError, open_log, unreadable
from clusterkit.runs.log.scan import LogScanner
from clusterkit.runs.log.stream import STDIN, StreamReader
from clusterkit.runs.log.unpack import SNIFFED_BYTES, Unpacker, packing_of
from clusterkit.runs.log.view import LogView, Sample
from trainer.errors import UserError
from trainer.files import write_atomic

__all__ = ["LogReader", "MissingLogError", "cache_folder", "log_reader", "read_log"]

SAVED_AFTER_BYTES = 1 << 18
"""Reading fewer new bytes once more is cheaper than saving the state."""

KEPT_LOGS = 50
VERSION = 2
"""Version of the saved state. Increase it when the parsers find more than before."""

_HEAD_BYTES = 1024
_PACKED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2")


@dataclass
class _Known:
    """How far one file was read. `head`: digest of its first `head_bytes`, which identifies a copy."""

    inode: int
    head: str
    head_bytes: int
    offset: int

    def fits(self, file: BinaryIO, inode: int | None) -> bool:
        """Whether this is the file that was read; `inode` None allows any."""
        if inode not in (None, self.inode) or os.fstat(file.fileno()).st_size < self.offset:
            return False
        return (inode is not None or self.head_bytes > 0) and _head(file, self.head_bytes) == self.head


class LogReader:
    """Follows one log that is plain text. folder: where to save the state for the next invocation; None: nowhere."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path.expanduser().absolute()
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]
        self._cache = None if folder is None else folder / f"{name}.json"
        self._scanner = LogScanner()
        self._known: list[_Known] = []
        self._unsaved = 0
        self._notes: list[str] = []
        self._load()

    def refresh(self) -> LogView:
        """Read what was appended since the last call.

        Raises:
            MissingLogError: there is no such file.
            UserError: the path is no file, or may not be read.
            RunError: the disk fails.
        """
        with ExitStack() as stack:
            current = stack.enter_context(open_log(self.path))
            older = [stack.enter_context(file) for file in _rotated(self.path)]
            info = os.fstat(current.fileno())
            try:
                news = self._read_all([*older, current])
                sample = Sample.of_file(current)
            except OSError as error:
                raise unreadable(self.path, error) from error
        self._unsaved += news
        if self._unsaved >= SAVED_AFTER_BYTES:
            self._save()
        history, notes = self._scanner.history, tuple(self._notes)
        return LogView(self.path, history, info.st_size, info.st_mtime, news, time.time(), sample, notes)

    def _read_all(self, files: list[BinaryIO]) -> int:
        """Read what is new in a log and its predecessors, oldest first; return its size in bytes."""
        found = [self._find(file) for file in files]
        first = next((index for index, known in enumerate(found) if known is not None), None)
        if first is None:
            self._scanner, first = LogScanner(), 0  # a new log
            self._notes.clear()
        known_files, news = [], 0
        for file, known in zip(files[first:], found[first:], strict=True):
            start = known.offset if known is not None else 0
            end = self._read(file, start)
            news += end - start
            if file is files[-1]:
                end -= self._scanner.forget_waiting()  # an incomplete line is read again
            else:
                self._scanner.feed(b"\n")
            size = min(end, _HEAD_BYTES)
            known_files.append(_Known(os.fstat(file.fileno()).st_ino, _head(file, size), size, end))
        self._known = known_files
        return news

    def _find(self, file: BinaryIO) -> _Known | None:
        inode = os.fstat(file.fileno()).st_ino
        same = (known for known in self._known if known.fits(file, inode))
        copied = (known for known in self._known if known.fits(file, None))
        return next(same, None) or next(copied, None)

    def _read(self, file: BinaryIO, start: int) -> int:
        """Read to the present end, even if the log grows meanwhile; return the position."""
        position, end = start, os.fstat(file.fileno()).st_size
        file.seek(position)
        if not start and packing_of(file.read(SNIFFED_BYTES)):  # a compressed predecessor
            return self._read_packed(file)
        file.seek(position)
        while position < end and (block := file.read(min(BLOCK_BYTES, end - position))):
            self._scanner.feed(block)
            position += len(block)
        return position

    def _read_packed(self, file: BinaryIO) -> int:
        file.seek(0)
        unpacker = Unpacker()
        while block := file.read(BLOCK_BYTES):
            for text in unpacker.feed(block):
                self._scanner.feed(text)
        for text in unpacker.end():
            self._scanner.feed(text)
        if unpacker.problem:
            self._notes.append(f"{file.name}: {unpacker.problem}")
        return file.tell()

    # -- between invocations ----------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._cache is None:
            return
        # If the state is missing, damaged or of another version, the log is read in full.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            state = json.loads(self._cache.read_bytes())
            if state["version"] == VERSION and state["path"] == str(self.path):
                known = [_Known(**fields) for fields in state["files"]]
                self._scanner, self._known = LogScanner.restored(state["scanner"]), known

    def _save(self) -> None:
        if self._cache is None:
            return
        files = [asdict(known) for known in self._known]
        state = {"version": VERSION, "path": str(self.path), "files": files, "scanner": self._scanner.state()}
        with suppress(OSError):  # the disk may be full or read-only
            self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(self._cache, json.dumps(state))
            _remove_oldest(self._cache.parent)
            self._unsaved = 0


def log_reader(path: Path, folder: Path | None = None, keep: int = 0) -> LogReader | StreamReader:
    """Return the reader for a log, by its content.

    Args:
        path: a file, a named pipe, or `-` for standard input.
        folder: where to save the state of a plain log; None: nowhere.
        keep: as for StreamReader.
    """
    if str(path) == STDIN:
        return StreamReader(path, keep)
    path = path.expanduser().absolute()
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            return StreamReader(path, keep)
        with open_log(path) as file:
            begin = file.read(SNIFFED_BYTES)
    except (OSError, UserError):
        return LogReader(path, folder)  # its refresh raises the error
    return StreamReader(path, keep) if packing_of(begin) else LogReader(path, folder)


def read_log(path: Path, folder: Path | None = None) -> LogView:
    """Read a log from where the last call with the same `folder` stopped. Raises the errors of LogReader.refresh."""
    return log_reader(path, folder).refresh()


def cache_folder() -> Path:
    """Return the folder of saved states: runlog/ in the state folder."""
    return state_folder() / "runlog"


def _rotated(path: Path) -> Iterator[BinaryIO]:
    """Open the log's predecessors (`main.log.2.gz`, `main.log.1`), oldest first."""
    numbered: dict[int, Path] = {}
    for other in sorted(path.parent.glob(f"{glob.escape(path.name)}.*"), reverse=True):
        name = other.name.removeprefix(f"{path.name}.")
        number = name.removesuffix(next((suffix for suffix in _PACKED_SUFFIXES if name.endswith(suffix)), ""))
        if number.isascii() and number.isdigit() and len(number) < 4 and other.is_file():
            numbered[int(number)] = other  # the plain one, if it is being compressed just now
    for _, other in sorted(numbered.items(), reverse=True):
        with suppress(OSError):
            yield other.open("rb", buffering=0)


def _head(file: BinaryIO, size: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(size)).hexdigest()


def _remove_oldest(folder: Path) -> None:
    caches = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in caches[:-KEPT_LOGS]:
        path.unlink(missing_ok=True)
