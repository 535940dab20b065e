"""Text files of the user's as documents: passages of a few sentences, each with a title."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterkit.data.datasets.cloze import sentences
from trainer.errors import UserError
from trainer.files import refuse_pointer
from trainer.tasks.hotpotqa_data import Document, document_key

MOST_CHARACTERS = 900
"""Of a passage; a paragraph that is longer is cut between sentences. HotpotQA's paragraphs have 570 on average."""
_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*")


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, and the file that it is from."""

    document: Document
    file: str


def read_passages(place: Path) -> tuple[list[Passage], str]:
    """Read a text file, or all below a folder, hidden ones left out; return its passages and a hash of the bytes.

    Raises:
        UserError: there is no text, or a file is not text in UTF-8.
    """
    files = sorted(path for path in place.rglob("*") if _is_wanted(path, place)) if place.is_dir() else [place]
    digest = hashlib.sha256()
    titles: Counter[str] = Counter()
    passages: dict[str, Passage] = {}
    for file in files:
        name = file.relative_to(place).as_posix() if file != place else file.name
        text = read_text(file)
        digest.update(f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        for heading, passage in _passages(text):
            title = heading or file.stem.replace("_", " ").replace("-", " ")
            titles[title] += 1
            if titles[title] > 1:
                title = f"{title}, part {titles[title]}"
            key = document_key(title, passage)
            name_of_text = hashlib.sha1(f"{title}\n{passage}".encode(), usedforsecurity=False).hexdigest()[:12]
            passages.setdefault(key, Passage(Document(name_of_text, title, passage, key), name))
    if not passages:
        what = "has no file with text" if place.is_dir() else "has no text"
        raise UserError(f"{place} {what}: name a folder of text files (.txt, .md …), or one file")
    return list(passages.values()), digest.hexdigest()


def read_text(file: Path) -> str:
    """Read a text file. Raises UserError for what cannot be read or is not text in UTF-8."""
    try:
        refuse_pointer(file)
        data = file.read_bytes()
        if b"\0" in data:
            raise UnicodeDecodeError("utf-8", data, data.index(b"\0"), data.index(b"\0") + 1, "a zero byte")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}): name a text file") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not text in UTF-8 (byte {error.start + 1}): turn it into a text file first, or take it out"
        ) from error


def _is_wanted(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)


def _passages(text: str) -> Iterator[tuple[str, str]]:
    """Yield (the heading above it, a passage); paragraphs stand between blank lines, headings begin with #."""
    heading, kept = "", ""
    for title, paragraph in _paragraphs(text):
        for piece in _pieces(paragraph):
            if kept and (title != heading or len(kept) + len(piece) >= MOST_CHARACTERS):
                yield heading, kept
                kept = ""
            heading, kept = title, f"{kept} {piece}".strip()
    if kept:
        yield heading, kept


def _paragraphs(text: str) -> Iterator[tuple[str, str]]:
    """Yield every paragraph as one line, with the heading above it."""
    heading = ""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        found = _HEADING.fullmatch(line.strip())
        if lines and (found or not line.strip()):
            yield heading, " ".join(" ".join(lines).split())
            lines = []
        if found:
            heading = found[1]
        elif line.strip():
            lines.append(line)


def _pieces(paragraph: str) -> Iterable[str]:
    """Return the paragraph, or runs of its sentences where it is too long."""
    if len(paragraph) < MOST_CHARACTERS:
        return [paragraph] if paragraph else []
    pieces: list[str] = []
    for sentence in sentences(paragraph):
        if pieces and len(pieces[-1]) + len(sentence) < MOST_CHARACTERS:
            pieces[-1] += f" {sentence}"
        else:
            pieces.append(sentence)
    return pieces
