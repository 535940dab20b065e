"""Text files of the user's as documents: passages of a few sentences, each with a title."""

from __future__ import annotations

import hashlib
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from trainer.errors import UserError
from trainer.files import refuse_pointer
from trainer.tasks.evidence import sentences
from trainer.tasks.hotpotqa_data import Document, document_key

MOST_CHARACTERS = 900
"""Of a passage; a paragraph that is longer is cut between sentences. HotpotQA's paragraphs have 570 on average."""
_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*")


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, and the file that it is from."""

    document: Document
    file: str


class BinaryFileError(UserError):
    """A file is no text in any encoding, but a picture, a PDF or the like."""


def read_passages(place: Path) -> tuple[list[Passage], str, list[str]]:
    """Read a text file, or all below a folder, hidden ones left out.

    Returns:
        Its passages, a hash of the bytes, and the names of the files of a folder that are no texts.

    Raises:
        UserError: there is no text, or a text is not in UTF-8.
    """
    files = sorted(path for path in place.rglob("*") if _is_wanted(path, place)) if place.is_dir() else [place]
    digest = hashlib.sha256()
    titles: Counter[str] = Counter()
    passages: dict[str, Passage] = {}
    binary: dict[str, BinaryFileError] = {}
    for file in files:
        name = file.relative_to(place).as_posix() if file != place else file.name
        try:
            text = read_text(file)
        except BinaryFileError as error:
            binary[name] = error
            continue
        digest.update(f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        for title, passage in titled_passages(text.splitlines(), file.stem, titles):
            key = document_key(title, passage)
            name_of_text = hashlib.sha1(f"{title}\n{passage}".encode(), usedforsecurity=False).hexdigest()[:12]
            passages.setdefault(key, Passage(Document(name_of_text, title, passage, key), name))
    if binary and not passages:
        raise next(iter(binary.values()))
    if not passages:
        what = "has no file with text" if place.is_dir() else "has no text"
        raise UserError(f"{place} {what}: name a folder of text files (.txt, .md …), or one file")
    return list(passages.values()), digest.hexdigest(), list(binary)


def read_text(file: Path) -> str:
    """Read a text file. Raises UserError for what cannot be read or is not text in UTF-8."""
    try:
        refuse_pointer(file)
        with file.open("rb") as stream:
            return "".join(text_blocks(stream, str(file)))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}): name a text file") from error


def text_blocks(stream: BinaryIO, name: str, size: int = 1 << 20) -> Iterator[str]:
    """Yield the text of a stream of UTF-8, without a byte order mark. Raises UserError: it is not text in UTF-8."""
    decoder = getincrementaldecoder("utf-8-sig")()
    place = 0
    while True:
        data = stream.read(size)
        if b"\0" in data:
            raise BinaryFileError(str(_no_text(name, place + data.index(b"\0"))))
        waiting = len(decoder.getstate()[0])  # bytes of a character that the last block has not ended
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _no_text(name, place - waiting + error.start) from error
        if text:
            yield text
        if not data:
            return
        place += len(data)


def text_lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in blocks, as `str.splitlines` cuts the whole."""
    waiting = ""
    for block in blocks:
        *lines, waiting = (waiting + block).splitlines(keepends=True)  # a line end may be cut in two: the last waits
        yield from (line.splitlines()[0] for line in lines)
    yield from waiting.splitlines()


def titled_passages(lines: Iterable[str], name: str, titles: Counter[str]) -> Iterator[tuple[str, str]]:
    """Yield (title, passage) of a text file's lines.

    Args:
        name: of the file without its ending; the title of a passage that has no heading above it.
        titles: how often each title was given until now; counted on, so that no two passages have the same one.
    """
    for heading, passage in _passages(lines):
        title = heading or name.replace("_", " ").replace("-", " ")
        titles[title] += 1
        yield (title if titles[title] == 1 else f"{title}, part {titles[title]}"), passage


def _no_text(name: str, place: int) -> UserError:
    return UserError(f"{name} is not text in UTF-8 (byte {place + 1}): turn it into a text file first, or take it out")


def _is_wanted(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)


def _passages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (the heading above it, a passage); paragraphs stand between blank lines, headings begin with #."""
    heading, kept = "", ""
    for title, paragraph in _paragraphs(lines):
        for piece in _pieces(paragraph):
            if kept and (title != heading or len(kept) + len(piece) >= MOST_CHARACTERS):
                yield heading, kept
                kept = ""
            heading, kept = title, f"{kept} {piece}".strip()
    if kept:
        yield heading, kept


def _paragraphs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield every paragraph as one line, with the heading above it."""
    heading = ""
    kept: list[str] = []
    for line in chain(lines, [""]):
        found = _HEADING.fullmatch(line.strip())
        if kept and (found or not line.strip()):
            yield heading, " ".join(" ".join(kept).split())
            kept = []
        if found:
            heading = found[1]
        elif line.strip():
            kept.append(line)


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
