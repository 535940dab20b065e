"""Inputs of `clusterkit data prepare`: JSON, JSON Lines and Parquet, whose first row's columns show their style.

| style | columns |
|---|---|
| hotpotqa | _id or id, question, answer, context, supporting_facts: the official file, or the form of the hub |
| squad | id, question, context, answers {text: […]}: the form of the hub, or the official nested file |
| booksum | text or chapter, summary or summary_text; bid, book_id or book names the book |
| memalpha | instance_id, data_source, chunks, questions_and_answers |
| math | problem, question or prompt, with answer, solution or solutions |

A folder of our own HotpotQA files (questions.jsonl and documents.jsonl) is of the style hotpotqa, too. Any other
folder, and a file that ends in .txt, .md, .rst or .text or begins like no table, is of the style text where that is
allowed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterkit.data.datasets.passages import GZIP, Passage, read_passages
from trainer.errors import UserError
from trainer.files import sha256
from trainer.tasks.hotpotqa_data import DOCUMENTS, QUESTIONS, Corpus, find_file, load_corpus
from trainer.tasks.hotpotqa_published import COLUMNS, TRAIN
from trainer.tasks.jsonl import Row, read_rows, read_table

TEXT = "text"
TEXT_ENDINGS = (".txt", ".md", ".rst", ".text")
_COLUMNS = {
    "memalpha": [{"chunks"}, {"questions_and_answers"}],
    "hotpotqa": [{"question"}, {"context"}, {"supporting_facts"}],
    "squad": [{"question"}, {"context"}, {"answers"}],
    "booksum": [{"text", "chapter"}, {"summary", "summary_text"}],
    "math": [{"problem", "question", "prompt"}, {"answer", "solution", "solutions"}],
}
_PUBLISHED = (
    "a file as MemAgent published it needs no preparing: clusterkit train --preset 135M_cpu --task hotpotqa "
    "task.path=FILE"
)


@dataclass(frozen=True)
class Input:
    """One file. `digest`: SHA-256 of its bytes. `corpus`: of a folder in our schema. `passages`: of text files.
    `binary`: files of a folder that are no texts.
    """

    path: Path
    style: str
    rows: list[Row]
    digest: str
    corpus: Corpus | None = None
    passages: Sequence[Passage] = ()
    binary: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Name of the file or folder, also where it was typed as a dot."""
        return self.path.name or self.path.resolve().name

    @property
    def count(self) -> int:
        """Return how many rows or passages it has."""
        return len(self.rows) or len(self.passages)


def read_input(path: Path, allowed: tuple[str, ...]) -> Input:
    """Read a file and find its style.

    Raises:
        UserError: the file is missing or damaged, or its style is unknown or not among those allowed.
    """
    if path.is_dir() and any(path.glob(f"{QUESTIONS}*")):
        return _folder(path, allowed)
    if path.is_dir() and any((path / name).is_file() for name in TRAIN):
        raise UserError(f"{path}: {_PUBLISHED}")
    if TEXT in allowed and (path.is_dir() or path.suffix.lower() in TEXT_ENDINGS or _begins_like_no_table(path)):
        passages, digest, binary = read_passages(path)
        return Input(path, TEXT, [], digest, passages=passages, binary=binary)
    rows = list(_rows(path))
    style = _require_style(path, style_of(rows[0]), allowed)
    return Input(path, style, rows, sha256(path))


def _begins_like_no_table(path: Path) -> bool:
    """Whether a file is there that can be neither JSON, gzipped or not, nor Parquet: a text, or no text at all."""
    if not path.is_file() or not {".json", ".jsonl"}.isdisjoint(map(str.lower, path.suffixes)):
        return False
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            start = stream.read(64).removeprefix(BOM_UTF8).lstrip()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return False  # damaged: read row by row, which says so
    return not start.startswith((b"{", b"[", b"PAR1"))


def _require_style(path: Path, style: str, allowed: tuple[str, ...]) -> str:
    if style not in allowed:
        raise UserError(f"{path} looks like {style}; this command wants {' or '.join(allowed)}")
    return style


def _folder(path: Path, allowed: tuple[str, ...]) -> Input:
    files = [find_file(path, name) for name in (QUESTIONS, DOCUMENTS)]
    style = _require_style(path, "hotpotqa", allowed)
    digest = hashlib.sha256("".join(sha256(file) for file in files).encode()).hexdigest()
    return Input(path, style, list(read_rows(files[0])), digest, load_corpus(path))


def style_of(row: Row) -> str:
    """Return the style of a file by its first row; UserError lists the known styles."""
    present = {name for name, value in row.fields.items() if value is not None}
    if present.issuperset(COLUMNS):
        raise row.error(_PUBLISHED)
    for style, wanted in _COLUMNS.items():
        if all(names & present for names in wanted):
            return style
    known = "; ".join(
        f"{style}: {', '.join('/'.join(sorted(names)) for names in wanted)}" for style, wanted in _COLUMNS.items()
    )
    raise row.error(f"columns {', '.join(map(repr, row.fields)) or 'none'} are of no known style ({known})")


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, or of a JSON document (a list, or SQuAD's nested form)."""
    if not path.is_file():
        raise UserError(f"{path}: no such file" if not path.exists() else f"{path} is a folder: name a file in it")
    document = _document(path)
    if document is None:
        yield from read_table(path)
        return
    number = 0
    for number, fields in enumerate(_items(document), start=1):
        if not isinstance(fields, dict):
            raise UserError(f"{path}, item {number}: must be an object")
        yield Row(path, number, fields)
    if not number:
        raise UserError(f"{path}: the file has no items")


def _document(path: Path) -> Any:
    """Return the content of a file that is one JSON list or object; None for tables."""
    with path.open("rb") as raw:
        packed = raw.read(len(GZIP)) == GZIP
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            start = stream.read(64).lstrip()
            if not start.startswith((b"[", b"{")):
                return None
            if start.startswith(b"{") and b'"data"' not in start and b'"version"' not in start:
                return None
            return json.loads(start + stream.read())
    except (ValueError, EOFError, OSError):
        return None  # read row by row, which says what is wrong and where


def _items(document: Any) -> Iterator[Any]:
    if isinstance(document, list):
        yield from document
        return
    for article in document.get("data", []):
        for paragraph in article.get("paragraphs", []):
            for pair in paragraph.get("qas", []):
                texts = [answer.get("text", "") for answer in pair.get("answers", [])]
                yield {
                    "id": pair.get("id"),
                    "title": article.get("title", ""),
                    "context": paragraph.get("context"),
                    "question": pair.get("question"),
                    "answers": {"text": texts},
                }
