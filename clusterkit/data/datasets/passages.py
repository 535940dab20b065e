"""Text files of the user's as documents: passages of a few sentences, each with a title."""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from clusterkit.data.datasets.prose import blocks_of, joined, without_front_matter
from trainer.errors import UserError
from trainer.files import refuse_pointer
from trainer.tasks.evidence import sentences
from trainer.tasks.hotpotqa_data import Document, document_key, is_prepared

MOST_CHARACTERS = 900
"""Of a passage; a paragraph that is longer is cut between sentences. HotpotQA's paragraphs have 570 on average."""
MOST_NAMES = 5
"""Of files, in a message."""
_HEADING = re.compile(r"#{1,6}\s+(.+?)\s*#*")
_RULE = re.compile(r"={3,}|-{3,}|~{3,}")
"""Below a line it makes that a heading, in Markdown and reStructuredText; elsewhere it is a rule."""
MOST_HEADING = 120
_UTF_16 = (BOM_UTF16_LE, BOM_UTF16_BE)
_FORMATTED = (b"%PDF-", b"{\\rtf")
"""How files begin that may have no byte 0, and are no texts to be read as they stand."""
GZIP = b"\x1f\x8b"
"""How gzipped files begin."""
_EXTRACT = "turn it into a text file first (a PDF: pdftotext), or take it out"
_GUNZIP = "decompress it first (gunzip), or take it out"
_CONVERT = "turn such a text into UTF-8 first (iconv -f WINDOWS-1252 -t UTF-8 FILE), or take it out"


@dataclass(frozen=True, slots=True)
class Passage:
    """A document, and the file that it is from."""

    document: Document
    file: str


class BinaryFileError(UserError):
    """A file is no text in any encoding, but a picture, a PDF or the like."""


class EncodingError(UserError):
    """A file is no text in UTF-8, and may be one in another encoding."""


def read_passages(place: Path) -> tuple[list[Passage], str, list[str]]:
    """Read a text file, or all below a folder, without hidden ones and what was prepared from them.

    Returns:
        Its passages, a hash of the bytes, and the names of the files of a folder that are no texts.

    Raises:
        UserError: there is no text, or texts are not in UTF-8: all of them are named.
    """
    files = _files(place) if place.is_dir() else [place]
    digest = hashlib.sha256()
    titles: Counter[str] = Counter()
    passages: dict[str, Passage] = {}
    binary: dict[str, BinaryFileError] = {}
    foreign: dict[str, EncodingError] = {}
    for file in files:
        name = file.relative_to(place).as_posix() if file != place else file.name
        try:
            text = read_text(file)
        except BinaryFileError as error:
            binary[name] = error
            continue
        except EncodingError as error:
            foreign[name] = error
            continue
        digest.update(f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
        for title, passage in titled_passages(text.splitlines(), file.stem, titles):
            key = document_key(title, passage)
            name_of_text = hashlib.sha1(f"{title}\n{passage}".encode(), usedforsecurity=False).hexdigest()[:12]
            passages.setdefault(key, Passage(Document(name_of_text, title, passage, key), name))
    if len(foreign) > 1:
        raise UserError(f"{place}: {len(foreign)} files are not text in UTF-8 ({some_of(foreign)}): {_CONVERT}")
    if foreign:
        raise next(iter(foreign.values()))
    if binary and not passages:
        raise next(iter(binary.values()))
    if not passages:
        what = "has no file with text" if place.is_dir() else "has no text"
        raise UserError(f"{place} {what}: name a folder of text files (.txt, .md …), or one file")
    return list(passages.values()), digest.hexdigest(), list(binary)


def some_of(names: Collection[str]) -> str:
    """Return the first names of files, for a message."""
    return ", ".join(list(names)[:MOST_NAMES]) + (", …" if len(names) > MOST_NAMES else "")


def read_text(file: Path) -> str:
    """Read a text file. Raises UserError for what cannot be read or is not text in UTF-8 (or marked UTF-16)."""
    try:
        refuse_pointer(file)
        with file.open("rb") as stream:
            return "".join(text_blocks(stream, str(file)))
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error}): name a text file") from error


def text_blocks(stream: BinaryIO, name: str, size: int = 1 << 20) -> Iterator[str]:
    """Yield the text of a stream of UTF-8, or of UTF-16 that begins with its mark, without the mark.

    Raises:
        EncodingError: it is text in another encoding.
        BinaryFileError: it is no text.
    """
    data = stream.read(max(size, 8))  # the longest of _FORMATTED, and any mark
    if data.startswith(_FORMATTED):
        raise BinaryFileError(_no_text(name, 0, _EXTRACT))
    if data.startswith(GZIP):
        raise BinaryFileError(_no_text(name, 0, _GUNZIP))
    wide = data.startswith(_UTF_16)
    decoder = getincrementaldecoder("utf-16" if wide else "utf-8-sig")()
    place = 0
    while True:
        if not wide and b"\0" in data:
            raise BinaryFileError(_no_text(name, place + data.index(b"\0"), _EXTRACT))
        waiting = len(decoder.getstate()[0])  # bytes of a character that the last block has not ended
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise EncodingError(_no_text(name, place - waiting + error.start, _CONVERT)) from error
        if wide and "\0" in text:  # UTF-32 begins with the same mark
            raise BinaryFileError(_no_text(name, place, _EXTRACT))
        if text:
            yield text
        if not data:
            return
        place += len(data)
        data = stream.read(size)


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


def _no_text(name: str, place: int, way_out: str) -> str:
    return f"{name} is not text in UTF-8 (byte {place + 1}): {way_out}"


def _files(folder: Path) -> list[Path]:
    """All files below a folder in order, without hidden ones and those that `data prepare reading` has made there."""
    found = sorted(path for path in folder.rglob("*") if not any(n[0] == "." for n in path.relative_to(folder).parts))
    made = {path for path in found if path.is_dir() and is_prepared(path)}
    return [path for path in found if path.is_file() and made.isdisjoint(path.parents)]


def _passages(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (the heading above it, a passage); paragraphs stand between blank lines."""
    heading, kept = "", ""
    for title, block in _blocks(without_front_matter(lines)):
        for piece in _pieces(block):
            if kept and (title != heading or len(kept) + len(piece) >= MOST_CHARACTERS):
                yield heading, kept
                kept = ""
            heading, kept = title, joined(kept, piece)
    if kept:
        yield heading, kept


def _blocks(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield every block of prose as one line, with the heading above it; what code has behind # is none."""
    heading, fenced = "", False
    kept: list[str] = []
    for line in chain(lines, [""]):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced, stripped = not fenced, ""
        code = fenced or line.startswith(("    ", "\t"))
        found = None if code else _HEADING.fullmatch(stripped)
        ruled = not code and _RULE.fullmatch(stripped)
        if ruled and len(kept) == 1 and len(kept[0]) <= MOST_HEADING:
            heading = kept.pop().strip()
        if kept and (found or fenced or not _has_words(stripped)):
            yield from ((heading, block) for block in blocks_of(kept))
            kept = []
        if found:
            heading = found[1]
        elif _has_words(stripped):
            kept.append(line)


def _has_words(line: str) -> bool:
    return any(map(str.isalnum, line))


def _pieces(block: str) -> Iterable[str]:
    """Return the block, or runs of its sentences where it is too long."""
    if len(block) < MOST_CHARACTERS:
        return [block] if block else []
    pieces: list[str] = []
    for sentence in sentences(block):
        if pieces and len(pieces[-1]) + len(sentence) < MOST_CHARACTERS:
            pieces[-1] = joined(pieces[-1], sentence)
        else:
            pieces.append(sentence)
    return pieces
