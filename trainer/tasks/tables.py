"""Rows of a table on disk, JSON Lines or Parquet alike, with errors that name the file and the row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.files import refuse_pointer
from trainer.tasks.jsonl import Row, read_rows

ENDINGS = (".parquet", ".jsonl", ".jsonl.gz", ".json")
_PARQUET = b"PAR1"
_LINES = (b"{", b"\x1f\x8b")
"""First bytes of JSON Lines, plain or gzipped, which are read whatever they are called."""
_BATCH = 256


def read_table(path: Path) -> Iterator[Row]:
    """Rows of a Parquet, JSON Lines or gzipped JSON Lines file; what it is is read from its first bytes.

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
    return _parquet(path) if start == _PARQUET else read_rows(path)


def find_table(folder: Path, stem: str) -> Path | None:
    """`stem` in `folder` with any of the endings (or `stem-00000-of-00001.parquet`, as the hub has it), or None."""
    for ending in ENDINGS:
        if (folder / f"{stem}{ending}").is_file():
            return folder / f"{stem}{ending}"
    parts = sorted(folder.glob(f"{stem}-*-of-*.parquet"))
    if len(parts) > 1:
        raise UserError(f"{folder} has {stem} in {len(parts)} parts: merge them into {stem}.parquet")
    return parts[0] if parts else None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet  # noqa: PLC0415 (optional, and only where such a file is read)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'clusterkit[data]', or make JSON lines of it"
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_BATCH):
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
