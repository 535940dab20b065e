"""`clusterkit ask`: the document that is put together, its sections, and what is refused before a model is loaded."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from builders import byte_tokenizer
from typer.testing import CliRunner

from clusterkit.cli.actions.ask import lines_of, time_left, warnings_of
from clusterkit.cli.main import app
from clusterkit.data.datasets.passages import read_text, text_blocks, text_lines
from clusterkit.evaluate.ask import ReadingParser, write_document
from evaluation.document import Document, blocks_of
from trainer.agents.memagent import MemAgent
from trainer.config_agents import MemagentConfig
from trainer.errors import UserError
from trainer.types import Task
from trainer.warmup.tiny import make_tokenizer

STORY = "".join(f"Paragraph {n} names lake Ül{n} and\r\nnothing else.\n\n" for n in range(40))


def written(tmp_path: Path, *files: str | Path, titled: bool = False) -> str:
    place = tmp_path / "document.txt"
    write_document([str(file) for file in files], place, titled=titled)
    return place.read_bytes().decode()


def text_file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def test_files_are_joined_as_they_stand_in_the_order_of_the_command(tmp_path: Path) -> None:
    one, two = text_file(tmp_path, "b.txt", "\ufeffEins\r\n"), text_file(tmp_path, "a.txt", "Zwei")
    assert written(tmp_path, one, two) == "Eins\r\n\n\nZwei"


def test_titled_documents_are_numbered_on_through_all_files(tmp_path: Path) -> None:
    notes = text_file(tmp_path, "lake_notes.md", "# Lakes\n\nThe Ouzel is deep.\n\n# Hills\n\nNone is high.")
    more = text_file(tmp_path, "more.txt", "Swans nest there.")
    assert written(tmp_path, notes, more, titled=True) == (
        "Document 1:\nLakes\nThe Ouzel is deep.\n\n"
        "Document 2:\nHills\nNone is high.\n\n"
        "Document 3:\nmore\nSwans nest there."
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\0more", "not text in UTF-8 (byte 5)"),
        (b"%PDF-1.4\n1 0 obj", "not text in UTF-8 (byte 1): turn it into a text file first (a PDF: pdftotext)"),
        (gzip.compress(b"text"), "not text in UTF-8 (byte 1): decompress it first (gunzip), or take it out"),
        ("Käse".encode("latin-1"), "(byte 2): turn such a text into UTF-8 first (iconv -f WINDOWS-1252"),
        ("one".encode("utf-32"), "turn it into a text file first"),
        (b"\xff\xfe", "nothing to read"),
        (b"a" * (1 << 20) + b"\xc3(", f"not text in UTF-8 (byte {(1 << 20) + 1})"),
        (b"caf\xc3", "not text in UTF-8 (byte 4)"),
        (b"", "nothing to read"),
        (b" \n\t", "nothing to read"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
    ids=["zero", "pdf", "gzip", "latin1", "utf32", "mark", "late", "cut", "empty", "blank", "pointer"],
)
@pytest.mark.parametrize("titled", [False, True])
def test_what_is_no_text_is_refused(tmp_path: Path, content: bytes, message: str, titled: bool) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        written(tmp_path, path, titled=titled)
    assert message in str(caught.value)
    assert "file.bin" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_texts_in_utf_16_with_its_mark_are_read(tmp_path: Path, encoding: str) -> None:
    text = "Käse\r\n😀 from Kelm\r\n"
    path = tmp_path / "notes.txt"
    path.write_bytes(text.encode(encoding) if encoding == "utf-16" else ("\ufeff" + text).encode(encoding))

    assert read_text(path) == text
    assert written(tmp_path, path) == text
    assert "".join(text_blocks(io.BytesIO(path.read_bytes()), "x", 1)) == text


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        written(tmp_path, tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="is a folder: name text files"):
        written(tmp_path, tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1 << 20])
def test_lines_are_the_same_however_a_text_is_cut_into_blocks(tmp_path: Path, size: int) -> None:
    text = "\ufeffä\r\nb\r\rc\u2028d\n\n€ end"
    blocks = text_blocks(io.BytesIO(text.encode()), "x", size)
    assert list(text_lines(blocks)) == text.removeprefix("\ufeff").splitlines()
    assert read_text(text_file(tmp_path, "x.txt", text)) == text.removeprefix("\ufeff")


@pytest.mark.parametrize("size", [10, 50, 333])
def test_blocks_divide_no_word(size: int) -> None:
    pieces = list(blocks_of(io.StringIO(STORY, newline=""), size))
    assert "".join(pieces) == STORY
    assert len(pieces) > 4
    assert [word for piece in pieces for word in piece.split()] == STORY.split()


@pytest.mark.parametrize("max_chunks", [0, 1, 3, 4, 1000])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_sections_are_those_of_an_evaluation(tmp_path: Path, max_chunks: int, block: int) -> None:
    tokenizer = byte_tokenizer()
    limits = MemagentConfig(chunk_tokens=37, max_chunks=max_chunks)
    document = Document(text_file(tmp_path, "story.txt", STORY), tokenizer, limits, block)
    prepared = MemAgent(limits, tokenizer).prepare(Task("t", "q", ("a",), STORY))
    sections = list(document.sections())
    assert sections == prepared.chunks
    assert document.num_sections == len(sections)
    assert document.left_out == prepared.dropped_tokens


def test_more_sections_than_allowed_are_an_error_where_the_agent_says_so(tmp_path: Path) -> None:
    limits = MemagentConfig(chunk_tokens=37, max_chunks=3, overflow="error")
    with pytest.raises(UserError, match=r"agent\.max_chunks is 3"):
        Document(text_file(tmp_path, "story.txt", STORY), byte_tokenizer(), limits)


def test_words_that_the_model_does_not_know_are_counted_and_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["the", "lake", "is", "deep"])
    text = "the Ouzel is deep\nthe Ouzel lake is a lake of a b c d e f"
    document = Document(text_file(tmp_path, "story.txt", text), tokenizer, MemagentConfig(), block=16)
    assert (document.unknown.count, document.unknown.first) == (10, ["Ouzel", "a", "of", "b", "c"])
    assert document.tokens == len(text.split())

    told = {"count": document.unknown.count, "first": document.unknown.first}
    lines = list(warnings_of({"event": "document", "unknown_words": {"question": {"count": 0}, "document": told}}))
    assert lines[0] == "warning: the model does not know 10 words of the document: Ouzel, a, of, b, c, …"
    assert "--model-path" in lines[1]


def test_a_model_that_knows_any_text_warns_of_nothing(tmp_path: Path) -> None:
    document = Document(text_file(tmp_path, "story.txt", STORY), byte_tokenizer(), MemagentConfig())
    assert document.unknown.count == 0
    assert list(warnings_of({"event": "document", "unknown_words": {"document": {"count": 0}}})) == []


def test_events_come_whole_however_the_output_is_cut() -> None:
    said: list[str] = []
    events: list[dict[str, Any]] = []
    parser = ReadingParser(said.append, events.append)
    output = 'ready ü\n{"event": "answer", "answer": "x"}\nerror: no room\nlower it\n'.encode()
    for place in range(len(output)):
        parser.feed(output[place : place + 1])
    assert said == ["ready ü"]
    assert events == [{"event": "answer", "answer": "x"}]
    assert parser.answered
    assert parser.error == "no room\nlower it"


def test_the_checkpoint_that_reads_is_named() -> None:
    event = {"event": "document", "tokens": 7, "sections": 1, "left_out_tokens": 0, "model_path": "/runs/step12"}
    assert list(lines_of(event)) == ["7 tokens in 1 section, read by /runs/step12"]


def test_a_memory_that_stays_is_not_shown_again() -> None:
    event = {"event": "section", "number": 2, "sections": 9, "memory": "a\nb", "memory_tokens": 3, "truncated": False}
    assert list(lines_of({**event, "changed": False})) == ["section 2 of 9: memory unchanged"]
    shown = list(lines_of({**event, "changed": True, "truncated": True}))
    assert shown == ["section 2 of 9: memory 3 tokens, cut at agent.max_memory_tokens", "    a", "    b"]


def test_a_long_reading_says_now_and_then_how_long_it_takes() -> None:
    def told(sections: int) -> dict[int, str]:
        events = ({"event": "section", "number": n, "sections": sections} for n in range(1, sections + 1))
        return {event["number"]: line for event in events for line in time_left(event, 2.0 * event["number"])}

    assert told(19) == {}, "28 seconds after the fifth"
    assert told(110) == {5: "about 3 min 30 s left", 50: "about 2 min left"}
    assert list(time_left({"event": "answer"}, 9.0)) == []


def test_a_memory_of_line_ends_alone_takes_one_line() -> None:
    event = {"event": "section", "number": 1, "sections": 1, "memory": "\n" * 96, "memory_tokens": 96}
    shown = list(lines_of({**event, "changed": True, "truncated": False}))
    assert shown == ["section 1 of 1: memory 96 tokens", "    (blank)"]


@pytest.mark.parametrize(
    ("question", "file", "message"),
    [(" ", "story.txt", "the question is empty"), ("Which lake?", "nowhere.txt", "there is no file nowhere.txt")],
)
def test_the_command_refuses_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str, file: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, "story.txt", STORY)
    monkeypatch.setattr("clusterkit.evaluate.ask.run_node", lambda *_: pytest.fail("a process was started"))
    done = CliRunner().invoke(app, ["ask", "--model-path", "smollm2-135m", "-q", question, file])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)
    assert done.exception.exit_code == 2


def test_two_questions_are_refused_in_place_of_the_first_being_forgotten(tmp_path: Path) -> None:
    story = text_file(tmp_path, "story.txt", STORY)
    done = CliRunner().invoke(
        app, ["ask", "--model-path", "smollm2-135m", "-q", "Which lake?", "-q", "Who?", str(story)]
    )
    assert isinstance(done.exception, UserError)
    assert "2 questions were given, and a text is read for one of them" in str(done.exception)
    assert done.exception.exit_code == 2
