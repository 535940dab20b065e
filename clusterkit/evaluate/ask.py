"""One question about text files: the document is put together here, a process of this machine reads it and answers."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from clusterkit.backends.base import Say, folder_of_runs
from clusterkit.data.datasets.passages import text_blocks, text_lines, titled_passages
from clusterkit.evaluate.process import OutputParser, failure_of, run_node
from clusterkit.evaluate.request import checkpoint_here, make_request, run_settings
from evaluation.config import AskConfig
from trainer.config import RunConfig
from trainer.config_tasks import HotpotqaConfig
from trainer.disk import file_failures
from trainer.errors import RunError, UserError
from trainer.files import refuse_pointer
from trainer.tasks.hotpotqa_data import render_one

STDIN = "-"
CONSOLE = "console.log"
"""The log of the reading process; without one there is nothing to keep."""
Show = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Question:
    """What was typed."""

    question: str
    files: tuple[str, ...]  # text files in the order in which they are read; `-` is standard input
    plain: bool  # leave the text as it stands, whatever the checkpoint has learned to read
    model_path: str | None  # the checkpoint; None for the newest
    preset: str | None  # whose agent settings hold
    settings: tuple[str, ...]
    server: dict[str, Any]
    cache_dir: str
    fileroot: str | None


def ask(question: Question, say: Say, show: Show) -> None:
    """Read the files with the checkpoint's memory and answer.

    Args:
        say: gets what the reading process says of its progress.
        show: gets every event, as docs/reading.md lists them.

    Raises:
        UserError: with the subclass that fits; no such checkpoint or file, no text in UTF-8, nothing to read.
    """
    if not question.question.strip():
        raise UserError("the question is empty: --question TEXT")
    checkpoint = checkpoint_here(question.model_path, folder_of_runs(question.fileroot))
    trained = run_settings(checkpoint, question.preset)
    titled = trained is not None and isinstance(trained.task, HotpotqaConfig) and not question.plain
    with _folder() as folder:
        config = _request(question, checkpoint, trained, folder)
        with file_failures(folder, "set TMPDIR to another folder"):
            write_document(question.files, folder / "document.txt", titled=titled)
            console, request = folder / CONSOLE, folder / "request.yaml"
            text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
            request.write_text(text, encoding="utf-8")
            console.touch()
        parser = ReadingParser(say, show)
        code = run_node(["evaluation.ask", str(request)], console, parser.feed, lambda: say("stopping"))
        if code or not parser.answered:
            log = f"the reading ended with code {code} and no message; its log is {console}"
            raise failure_of(code, parser.error, "interrupted before the answer; nothing is kept", log)


def write_document(files: Sequence[str], place: Path, *, titled: bool) -> None:
    """Write the text of all files into one.

    Args:
        files: names; `-` is standard input. What is no regular file, such as a pipe, is read once.
        titled: as the documents of HotpotQA: passages, each with a number and a title.

    Raises:
        UserError: a file cannot be read or is no text (see text_blocks), or there is no text in any.
    """
    found = False
    titles: Counter[str] = Counter()
    with place.open("w", encoding="utf-8", newline="") as document:
        for name in files:
            with _opened(name) as stream:
                blocks = text_blocks(stream, "standard input" if name == STDIN else name)
                pieces = _titled(blocks, name, titles) if titled else _joined(blocks, first=not found)
                for piece in pieces:
                    found = found or bool(piece.strip())
                    document.write(piece)
    if not found:
        raise UserError("there is nothing to read: " + ", ".join(_called(name) for name in files) + " has no text")


def _titled(blocks: Iterator[str], name: str, titles: Counter[str]) -> Iterator[str]:
    """Yield a file's passages as documents, numbered on from those of other files."""
    stem = "standard input" if name == STDIN else Path(name).stem
    for title, passage in titled_passages(text_lines(blocks), stem, titles):
        number = titles.total()
        yield ("\n\n" if number > 1 else "") + render_one(number, title, passage)


def _joined(blocks: Iterator[str], *, first: bool) -> Iterator[str]:
    """Yield a file's text as it stands, behind a blank line where another file is before it."""
    for number, block in enumerate(blocks):
        yield block if first or number else f"\n\n{block}"


def _called(name: str) -> str:
    return "standard input" if name == STDIN else name


@contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """The bytes of a file or of standard input. Raises UserError where they cannot be read."""
    if name == STDIN:
        yield sys.stdin.buffer
        return
    path = Path(name).expanduser()
    if path.is_dir():
        raise UserError(f"{name} is a folder: name text files, such as {name.rstrip('/')}/*.txt")
    try:
        if path.is_file():
            refuse_pointer(path)
        with path.open("rb") as stream:
            yield stream
    except FileNotFoundError:
        raise UserError(f"there is no file {name}: name text files, or - for standard input") from None
    except PermissionError as error:
        raise UserError(f"{name} may not be read: {error.strerror}") from None


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for the document, what the process says and its servers' logs; it stays where these say what failed."""
    folder = Path(tempfile.mkdtemp(prefix="clusterkit-ask-"))
    keep = False
    try:
        yield folder
    except RunError as error:
        keep = str(folder) in str(error) and (folder / CONSOLE).exists()  # a full disk is not kept full
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _request(question: Question, checkpoint: str, trained: RunConfig | None, folder: Path) -> AskConfig:
    values = {
        "model_path": checkpoint,
        "output_path": str(folder),
        "data_names": [],
        "cache_dir": question.cache_dir,
        "server": question.server,
    }
    return AskConfig(
        document=os.fspath(folder / "document.txt"),
        question=question.question.strip(),
        evaluation=make_request(values, trained, question.settings),
    )


class ReadingParser(OutputParser):
    """What the reading process prints. answered: whether the answer has come."""

    RESULT = '{"event": '

    def __init__(self, say: Say, show: Show) -> None:
        super().__init__(say)
        self._show = show
        self.answered = False

    def take_result(self, result: dict[str, Any]) -> None:
        """See OutputParser."""
        self.answered = self.answered or result["event"] == "answer"
        self._show(result)
