"""Record of an evaluation on disk, row by row, so that no answer is sampled twice or mixed with others.

A row (a suite read in one way) has a folder of its own, named by the hash of everything that shapes its answers:

    records/NAME-HASH/inputs.json       those inputs, the questions' ids, the first prompt
                      questions.jsonl   question, true answers, prompt
                      samples.jsonl     one line an answer, appended as it comes; the last line for an answer counts
                      verdicts-HASH.jsonl   the same for its grading, by the settings of the grading

A kill costs the lines that were not written yet, and half of one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from trainer.disk import file_failure
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.locks import HeldError, hold
from trainer.staging import nothing_if_refused

LOCK = "eval.lock"
"""File in an output folder, locked by the evaluation that writes there."""
GREEDY = "greedy"
Key = tuple[str, str]
"""Question id, and sample: "greedy" or a number from 0."""


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def wanted_keys(questions: Sequence[str], greedy: bool, samples: int) -> list[Key]:
    """Keys of all answers that are asked for, question by question."""
    names = [*([GREEDY] if greedy else []), *map(str, range(samples))]
    return [(question, name) for question in questions for name in names]


@dataclass(slots=True)
class Lines:
    """A growing JSON-lines file; its entries are identified by id and sample."""

    path: Path
    entries: dict[Key, dict[str, Any]]
    _file: FileIO | None = None

    @classmethod
    def read(cls, path: Path) -> Lines:
        """Read a file; half-written and damaged lines are skipped."""
        entries: dict[Key, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                    entries[str(entry["id"]), str(entry["sample"])] = entry
                except (ValueError, KeyError, TypeError):
                    continue
        return cls(path, entries)

    def append(self, entry: dict[str, Any]) -> None:
        """Append an entry, past any buffer of ours. Raises RunError on a full disk."""
        line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            if self._file is None:
                # Past any buffer: what a full disk does not take would be written when it is closed, and fail there.
                self._file = self.path.open("ab", buffering=0)
                if self._file.tell() and not _ends_with_newline(self.path):
                    line = b"\n" + line
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise disk_failure(self.path, error) from error
        self.entries[str(entry["id"]), str(entry["sample"])] = entry

    def close(self) -> None:
        """Make what was added durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


class RowRecord:
    """Folder of one row. inputs: what shapes its answers. grading: what shapes its verdicts."""

    def __init__(self, root: Path, name: str, inputs: dict[str, Any], grading: dict[str, Any]) -> None:
        self.inputs, self.hash = inputs, digest(inputs)
        safe = "".join(c if c.isalnum() or c in "._-@" else "-" for c in name)[:80]
        self.folder = root / f"{safe}-{self.hash[:12]}"
        self.samples = Lines.read(self.folder / "samples.jsonl")
        self.verdicts = Lines.read(self.folder / f"verdicts-{digest(grading)[:8]}.jsonl")

    @property
    def questions(self) -> list[str] | None:
        """Ids of the questions, in order; None before they were loaded for the first time."""
        try:
            found = json.loads((self.folder / "inputs.json").read_text(encoding="utf-8"))
            return list(found["questions"]) if found["inputs"] == self.inputs else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def forms(self) -> dict[str, str]:
        """Question id -> form of the answer that it asks for (`trainer.tasks.hotpotqa_data`), where that is known."""
        try:
            lines = (self.folder / "questions.jsonl").read_text(encoding="utf-8").split("\n")
            rows = [json.loads(line) for line in lines if line]
            return {row["id"]: row["meta"]["form"] for row in rows if "form" in row.get("meta", {})}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def begin(self, details: dict[str, Any], questions: Sequence[dict[str, Any]]) -> None:
        """Write what the row is. details: first prompt, source, versions. Raises UserError or RunError for the disk."""
        ids = [question["id"] for question in questions]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lines = "".join(json.dumps(question, ensure_ascii=False) + "\n" for question in questions)
            write_atomic(self.folder / "questions.jsonl", lines)
            text = json.dumps({"inputs": self.inputs, **details, "questions": ids}, ensure_ascii=False, indent=1)
            write_atomic(self.folder / "inputs.json", text)
        except OSError as error:
            raise disk_failure(self.folder, error) from error

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Answers that are not there, or failed."""
        return [key for key in keys if self.samples.entries.get(key, {"error": "missing"}).get("error")]

    def ungraded(self, keys: Sequence[Key]) -> list[Key]:
        """Answers that are there and have no verdict of their own."""
        return [
            key
            for key in keys
            if (sample := self.samples.entries.get(key)) is not None
            and not sample.get("error")
            and self.verdicts.entries.get(key, {}).get("text_sha") != text_sha(sample["text"])
        ]

    def close(self) -> None:
        """Make what was added durable."""
        self.samples.close()
        self.verdicts.close()


def text_sha(text: str) -> str:
    """What ties a verdict to the answer that it is about."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


@contextmanager
def output_lock(folder: Path) -> Iterator[None]:
    """Hold an output folder against other evaluations. A block that is refused leaves neither lock nor empty folder.

    Raises:
        UserError: one is at work, or it cannot be written.
    """
    lock = folder / LOCK
    with nothing_if_refused(folder):
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                was_there = lock.exists()
                file = lock.open("a+b")
            except OSError as error:
                raise disk_failure(folder, error) from error
            with file, nothing_if_refused(folder) as made:  # removed while it is held, never when it may be another's
                made.extend([] if was_there else [lock])
                try:
                    hold(file)
                except HeldError as error:
                    made.clear()
                    raise UserError(
                        f"another evaluation (process {error.holder or '?'}) writes into {folder}: wait for its end, "
                        "or choose another --out"
                    ) from None
                except OSError as error:  # a file system without locks, or a full one
                    raise disk_failure(lock, error) from error
                if _is_at(lock, file):
                    yield
                    return


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file is still at its path: an evaluation that is refused takes its lock away."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def disk_failure(path: Path, error: OSError) -> UserError:
    """Exception for an error of the disk; the same command goes on with what is written."""
    failure = file_failure(error, path, "choose another --out")
    return type(failure)(f"{failure}. The same command then goes on with what is written")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
