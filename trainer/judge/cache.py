"""Answers kept on disk by the content of the request: one appended line per request; a torn last line does no harm."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)


def request_key(request: dict[str, Any]) -> str:
    """Hash of everything that an answer depends on."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:32]


class AnswerCache:
    """Answers in `folder`. Every process appends to a file of its own and reads those of all others once, at its start.

    A folder that cannot be written costs the cache, not the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, str] = {}
        self._file: IO[str] | None = None
        self._writes = True
        for path in sorted(folder.glob("*.jsonl")):
            self._read(path)

    def get(self, key: str) -> str | None:
        """The answer to a request, or None."""
        return self._known.get(key)

    def put(self, key: str, answer: str) -> None:
        """Keep an answer."""
        self._known[key] = answer
        if not self._writes:
            return
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                name = f"{os.uname().nodename}-{os.getpid()}.jsonl"
                self._file = (self.folder / name).open("a", encoding="utf-8")
            self._file.write(json.dumps({"key": key, "answer": answer}, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            log.warning("answers of the judge cannot be kept in %s (%s): they are asked for again", self.folder, error)
            self._writes = False

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            return
        for line in lines:
            try:
                record = json.loads(line)
                self._known[str(record["key"])] = str(record["answer"])
            except (ValueError, KeyError, TypeError):
                continue
