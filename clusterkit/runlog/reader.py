"""Reads logs of several GB again and again: only what was appended, also between invocations.

A log is known again by its inode and its first bytes, so one that was rotated away (`main.log.1`) is read to its end
before its successor, and one that was replaced by another is read anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from clusterkit.runlog.scan import LogScanner
from clusterkit.runlog.view import LogView
from trainer.errors import RunError, UserError

BLOCK_BYTES = 1 << 18
"""Fits into a processor's second-level cache, through which each block goes several times."""

SAVED_AFTER_BYTES = 1 << 18
"""With less news than this, reading it once more is cheaper than writing down what was read."""

KEPT_LOGS = 50
VERSION = 1
"""Of what is remembered between invocations. Count it up when the parsers find more than they did."""

_HEAD_BYTES = 1024


class MissingLogError(UserError):
    """There is no such log, or not at this moment."""


@dataclass
class _Known:
    """How far one file was read. head: digest of its first `head_bytes`, by which a copy is known again."""

    inode: int
    head: str
    head_bytes: int
    offset: int

    def fits(self, file: BinaryIO, inode: int | None) -> bool:
        """Whether this file was read so far; any inode will do where it is None."""
        if inode not in (None, self.inode) or os.fstat(file.fileno()).st_size < self.offset:
            return False
        return (inode is not None or self.head_bytes > 0) and _head(file, self.head_bytes) == self.head


class LogReader:
    """One log, followed over time.

    folder: where to remember how far it was read, for the next invocation; None keeps it in memory alone.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path = path.expanduser().absolute()
        name = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:32]
        self._cache = None if folder is None else folder / f"{name}.json"
        self._scanner = LogScanner()
        self._known: list[_Known] = []
        self._unsaved = 0
        self._load()

    def refresh(self) -> LogView:
        """Read what was appended since the last call.

        Raises:
            MissingLogError: there is no such file.
            UserError: it is no file, or may not be read.
            RunError: the disk fails.

        """
        with ExitStack() as stack:
            current = stack.enter_context(_open(self.path))
            older = [stack.enter_context(file) for file in _rotated(self.path)]
            info = os.fstat(current.fileno())
            try:
                news = self._read_all([*older, current])
            except OSError as error:
                raise _unreadable(self.path, error) from error
        self._unsaved += news
        if self._unsaved >= SAVED_AFTER_BYTES:
            self._save()
        return LogView(self.path, self._scanner.history, info.st_size, info.st_mtime, news, time.time())

    def _read_all(self, files: list[BinaryIO]) -> int:
        """Read the news of a log and of its predecessors, oldest first; returns how many bytes that was."""
        found = [self._find(file) for file in files]
        begun = next((index for index, known in enumerate(found) if known is not None), None)
        if begun is None:
            self._scanner, begun = LogScanner(), 0  # another log than before, or the first look at it
        known_files, news = [], 0
        for file, known in zip(files[begun:], found[begun:], strict=True):
            start = known.offset if known is not None else 0
            end = self._read(file, start)
            news += end - start
            if file is files[-1]:
                end -= self._scanner.forget_waiting()  # half a line is read again with its end
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
        """Read up to what is the end now: a log that grows faster than it is read has one too."""
        position, end = start, os.fstat(file.fileno()).st_size
        file.seek(position)
        while position < end and (block := file.read(min(BLOCK_BYTES, end - position))):
            self._scanner.feed(block)
            position += len(block)
        return position

    # -- between invocations ----------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._cache is None:
            return
        # A cache that is missing, damaged or of another version costs one full read, nothing else.
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
        with suppress(OSError):  # a full or read-only disk must not keep anybody from seeing the log
            self._cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_atomic(self._cache, json.dumps(state).encode())
            _remove_oldest(self._cache.parent)
            self._unsaved = 0


def read_log(path: Path, folder: Path | None = None) -> LogView:
    """What a log says, read from where the last call with the same `folder` stopped. Raises as LogReader.refresh."""
    return LogReader(path, folder).refresh()


def cache_folder() -> Path:
    """Where invocations remember how far they read: runlog/ in the state folder."""
    from clusterkit.provision.hostlog import state_folder  # noqa: PLC0415 (imports half of provisioning)

    return state_folder() / "runlog"


def _open(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            kind = f"a folder: name the file, such as {path / 'main.log'}" if path.is_dir() else "no regular file"
            raise UserError(f"{path} is {kind}")
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        raise MissingLogError(f"there is no log {path}: name an existing file with --log FILE") from None
    except PermissionError:
        raise UserError(f"{path} may not be read: become its owner, or ask for `chmod a+r {path}`") from None
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot read {path}: {error.strerror or error}. Check the disk or mount that it is on")


def _rotated(path: Path) -> Iterator[BinaryIO]:
    """The log's predecessors (`main.log.2`, `main.log.1`), oldest first."""
    numbered = []
    for other in path.parent.glob(f"{_escaped(path.name)}.*"):
        number = other.name.removeprefix(f"{path.name}.")
        if number.isascii() and number.isdigit() and len(number) < 4 and other.is_file():
            numbered.append((int(number), other))
    for _, other in sorted(numbered, reverse=True):
        with suppress(OSError):
            yield other.open("rb", buffering=0)


def _escaped(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _head(file: BinaryIO, size: int) -> str:
    file.seek(0)
    return hashlib.sha256(file.read(size)).hexdigest()


def _write_atomic(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _remove_oldest(folder: Path) -> None:
    caches = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in caches[:-KEPT_LOGS]:
        path.unlink(missing_ok=True)
