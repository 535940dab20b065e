"""Rows of files, JSON Lines (plain or gzipped) or Parquet, with errors that name the file and the row."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from trainer.errors import UserError
from trainer.files import refuse_pointer


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a JSON Lines file: its fields, and where they stand."""

    path: Path
    line: int
    fields: dict[str, Any]

    def text(self, column: str, default: str | None = None) -> str:
        """A string column. Raises UserError when it is missing (and there is no default), empty or no string."""
        if default is not None and column not in self.fields:
            return default
        value = self.value(column)
        if not isinstance(value, str):
            raise self.error(f"column '{column}' must be a string, not {kind(value)}")
        if default is None and not value.strip():
            raise self.error(f"column '{column}' is empty")
        return value

    def texts(self, column: str) -> tuple[str, ...]:
        """A column holding a list of at least one string. Raises UserError for anything else."""
        value = self.value(column)
        if not isinstance(value, list):
            raise self.error(f"column '{column}' must be a list of strings, not {kind(value)}")
        if not value:
            raise self.error(f"column '{column}' is an empty list: it needs at least one string")
        for item in value:
            if not isinstance(item, str) or not item.strip():
                what = "an empty string" if isinstance(item, str) else kind(item)
                raise self.error(f"column '{column}' must be a list of strings, but holds {what}")
        return tuple(value)

    def error(self, problem: str) -> UserError:
        """Make an error that says where this row stands."""
        return UserError(f"{self.path}, line {self.line}: {problem}")

    def value(self, column: str) -> Any:
        """A column of any type. Raises UserError when it is missing."""
        if column not in self.fields:
            available = ", ".join(map(repr, self.fields)) or "none"
            raise self.error(f"column '{column}' is missing (columns there: {available})")
        return self.fields[column]


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a .jsonl or .jsonl.gz file in UTF-8, blank lines left out.

    Whether it is gzipped is read from its first bytes, not from its name. Raises UserError, naming file and line, for a
    missing, unreadable, empty or damaged file, and for a line that is not a JSON object.
    """
    line = 0
    found = False
    try:
        with _open(path) as stream:
            for line, raw in enumerate(stream, start=1):
                if raw.strip():
                    found = True
                    yield Row(path, line, _parse(path, line, raw))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path}: damaged gzip data after line {line} ({error}): copy or download the file again"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not found:
        raise UserError(f"{path}: the file is empty: it needs one JSON object a line")


def kind(value: Any) -> str:
    """What JSON calls the type of a value, with its article."""
    if value is None:
        return "null"
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]


def _open(path: Path) -> IO[bytes]:
    refuse_pointer(path)
    with path.open("rb") as stream:
        gzipped = stream.read(2) == b"\x1f\x8b"
    if path.suffix == ".gz" and not gzipped and path.stat().st_size:
        raise gzip.BadGzipFile("it does not begin like a gzip file")
    return cast(IO[bytes], gzip.open(path)) if gzipped else path.open("rb")


def _parse(path: Path, line: int, raw: bytes) -> dict[str, Any]:
    where = f"{path}, line {line}"
    try:
        # utf-8-sig: some editors put a byte order mark before the first line.
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte {error.start + 1} of the line): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}): one JSON object a line") from error
    except RecursionError as error:
        raise UserError(f"{where}: not usable JSON (nested too deeply): one flat JSON object a line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: must be a JSON object, not {kind(value)}")
    return value


ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
_PARQUET = b"PAR1"
_LINES = (b"{", b"\x1f\x8b")
"""First bytes of JSON Lines, plain or gzipped, which are read whatever they are called."""
_BATCH = 256


def read_table(path: Path, columns: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a Parquet, JSON Lines or gzipped JSON Lines file; what it is is read from its first bytes.

    columns: of a Parquet file, those that are read; all where none is named.

    Raises:
        UserError: as `read_rows`; or it is a Parquet file that is damaged, or cannot be read here.
    """
    try:
        refuse_pointer(path)
        with path.open("rb") as stream:
            start = stream.read(4)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    if path.suffix == ".parquet" and start != _PARQUET and not start.startswith(_LINES):
        raise UserError(f"{path}: no Parquet file (it does not begin with PAR1): copy or download it again")
    return _parquet(path, columns) if start == _PARQUET else read_rows(path)


def find_table(folder: Path, stem: str) -> Path | None:
    """`stem` in `folder` with any of the endings (or `stem-00000-of-00001.parquet`, as the hub has it), or None."""
    for ending in ENDINGS:
        if (folder / f"{stem}{ending}").is_file():
            return folder / f"{stem}{ending}"
    parts = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if len(parts) > 1:
        raise UserError(f"{folder} has {stem} in {len(parts)} parts: merge them into {stem}.parquet")
    return parts[0] if parts else None


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415 (optional, and only where such a file is read)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'clusterkit[data]', or make JSON lines of it"
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH, columns=list(columns) or None):
            rows: list[dict[str, Any]] = batch.to_pylist()
            for fields in rows:
                number += 1
                yield Row(path, number, fields)
    except (ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path}: damaged Parquet file after row {number} ({error}): copy or download it again"
        ) from error
    if not number:
        raise UserError(f"{path}: the file has no rows")
