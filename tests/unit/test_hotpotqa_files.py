"""HotpotQA files that are missing, damaged or of another shape: one message that says where and what to do."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from trainer import assets
from trainer.config_tasks import HotpotqaConfig
from trainer.errors import UserError
from trainer.tasks.hotpotqa import HotpotQA
from trainer.tasks.hotpotqa_data import find_folder, load_corpus


def failure(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        HotpotQA(HotpotqaConfig(path=str(folder), num_documents=12), seed=1)
    assert caught.value.exit_code == 2
    return str(caught.value)


def set_line(file: Path, number: int, text: str) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    lines[number - 1] = text
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def set_field(file: Path, number: int, **fields) -> None:
    row = {**json.loads(file.read_text(encoding="utf-8").splitlines()[number - 1]), **fields}
    set_line(file, number, json.dumps({k: v for k, v in row.items() if v != "REMOVED"}))


@pytest.mark.parametrize("name", ["questions.jsonl", "documents.jsonl"])
def test_missing_file(mini_hotpotqa: Path, name: str) -> None:
    (mini_hotpotqa / name).unlink()
    message = failure(mini_hotpotqa)
    assert name in message
    assert str(mini_hotpotqa) in message
    assert "clusterkit assets get hotpotqa" in message


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(mini_hotpotqa: Path, content: str) -> None:
    (mini_hotpotqa / "questions.jsonl").write_text(content)
    assert "questions.jsonl: the file is empty" in failure(mini_hotpotqa)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"id": "a", ', "not JSON"),
        ("[1, 2]", "must be a JSON object, not a list"),
        ("null", "must be a JSON object, not null"),
        ("[" * 100_000, "not usable JSON"),
    ],
)
def test_line_that_is_no_json_object(mini_hotpotqa: Path, line: str, problem: str) -> None:
    set_line(mini_hotpotqa / "questions.jsonl", 3, line)
    message = failure(mini_hotpotqa)
    assert f"questions.jsonl, line 3: {problem}" in message
    assert len(message) < 500


def test_line_that_is_not_utf8(mini_hotpotqa: Path) -> None:
    file = mini_hotpotqa / "documents.jsonl"
    lines = file.read_bytes().splitlines()
    lines[4] = b'{"id": "caf\xe9"}'
    file.write_bytes(b"\n".join(lines))
    assert "documents.jsonl, line 5: not UTF-8 (byte 12" in failure(mini_hotpotqa)


@pytest.mark.parametrize("column", ["id", "question", "answers", "supporting", "own_documents"])
def test_missing_column_of_a_question(mini_hotpotqa: Path, column: str) -> None:
    set_field(mini_hotpotqa / "questions.jsonl", 7, **{column: "REMOVED"})
    assert f"questions.jsonl, line 7: column '{column}' is missing" in failure(mini_hotpotqa)


@pytest.mark.parametrize("column", ["id", "title", "text"])
def test_missing_column_of_a_document(mini_hotpotqa: Path, column: str) -> None:
    set_field(mini_hotpotqa / "documents.jsonl", 2, **{column: "REMOVED"})
    assert f"documents.jsonl, line 2: column '{column}' is missing" in failure(mini_hotpotqa)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("question", 5, "must be a string, not a number"),
        ("question", "  ", "is empty"),
        ("answers", "yes", "must be a list of strings, not a string"),
        ("answers", [], "is an empty list"),
        ("answers", [True], "must be a list of strings, but holds a boolean"),
        ("answers", [""], "must be a list of strings, but holds an empty string"),
        ("own_documents", {"a": 1}, "must be a list of strings, not an object"),
        ("source", None, "must be a string, not null"),
    ],
)
def test_column_of_a_wrong_type(mini_hotpotqa: Path, column: str, value: object, problem: str) -> None:
    set_field(mini_hotpotqa / "questions.jsonl", 4, **{column: value})
    assert f"questions.jsonl, line 4: column '{column}' {problem}" in failure(mini_hotpotqa)


def test_source_may_be_left_out(mini_hotpotqa: Path) -> None:
    set_field(mini_hotpotqa / "questions.jsonl", 1, source="REMOVED")
    assert load_corpus(mini_hotpotqa).questions[0].source == ""


def test_unknown_document(mini_hotpotqa: Path) -> None:
    set_field(mini_hotpotqa / "questions.jsonl", 4, own_documents=["p3", "t3", "nowhere"])
    assert "questions.jsonl, line 4: unknown document id 'nowhere'" in failure(mini_hotpotqa)


def test_gold_document_that_the_question_does_not_own(mini_hotpotqa: Path) -> None:
    set_field(mini_hotpotqa / "questions.jsonl", 4, supporting=["p3", "t5"])
    assert "line 4: supporting document 't5' is not among own_documents" in failure(mini_hotpotqa)


@pytest.mark.parametrize(("name", "identifier"), [("questions.jsonl", "mini-i0"), ("documents.jsonl", "p0")])
def test_id_used_twice(mini_hotpotqa: Path, name: str, identifier: str) -> None:
    set_field(mini_hotpotqa / name, 5, id=identifier)
    assert f"{name}, line 5: id '{identifier}' occurs a second time" in failure(mini_hotpotqa)


def compress(folder: Path, name: str) -> Path:
    file = folder / f"{name}.gz"
    file.write_bytes(gzip.compress((folder / name).read_bytes()))
    (folder / name).unlink()
    return file


def test_gzipped_files_give_the_same_tasks(mini_hotpotqa: Path) -> None:
    expected = load_corpus(mini_hotpotqa)
    compress(mini_hotpotqa, "questions.jsonl")
    compress(mini_hotpotqa, "documents.jsonl")
    assert load_corpus(mini_hotpotqa) == expected


def test_truncated_gzip(mini_hotpotqa: Path) -> None:
    file = compress(mini_hotpotqa, "questions.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    message = failure(mini_hotpotqa)
    assert "questions.jsonl.gz: damaged gzip data" in message
    assert "again" in message


def test_gzip_with_a_flipped_byte(mini_hotpotqa: Path) -> None:
    file = compress(mini_hotpotqa, "questions.jsonl")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    # A flipped byte shows as a damaged stream, or as damaged text on some line before the check sum is reached.
    assert "questions.jsonl.gz" in failure(mini_hotpotqa)


def test_gz_name_on_something_else(mini_hotpotqa: Path) -> None:
    (mini_hotpotqa / "questions.jsonl").rename(mini_hotpotqa / "questions.jsonl.gz")
    assert "questions.jsonl.gz: damaged gzip data" in failure(mini_hotpotqa)


def test_folder_in_place_of_a_file(mini_hotpotqa: Path) -> None:
    (mini_hotpotqa / "questions.jsonl").unlink()
    (mini_hotpotqa / "questions.jsonl").mkdir()
    assert "questions.jsonl: cannot be read" in failure(mini_hotpotqa)


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    message = failure(tmp_path / "nowhere")
    assert f"task.path={tmp_path / 'nowhere'}: there is no such folder" in message
    assert "clusterkit assets get hotpotqa" in message


def test_file_given_for_the_folder(mini_hotpotqa: Path) -> None:
    assert "is a file; give the folder" in failure(mini_hotpotqa / "questions.jsonl")


@pytest.fixture
def no_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Point every place that is searched at folders that do not exist."""
    monkeypatch.setattr(assets, "SHARED_DATASETS", tmp_path / "storage")
    monkeypatch.setenv("CLUSTERKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CLUSTERKIT_DATA", str(tmp_path / "data"))
    return tmp_path


def test_nothing_found_lists_where_it_looked(no_usual_place: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_folder(None)
    message = str(caught.value)
    assert all(str(no_usual_place / place / "hotpotqa") in message for place in ("data", "storage", "cache"))
    assert "clusterkit assets get hotpotqa" in message


def test_places_are_searched_in_order(no_usual_place: Path, mini_hotpotqa: Path) -> None:
    for place in ("cache", "storage", "data"):
        folder = no_usual_place / place / "hotpotqa"
        folder.mkdir(parents=True)
        for file in mini_hotpotqa.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        assert find_folder(None) == folder
    assert find_folder(None, cache_dir=str(no_usual_place / "elsewhere")).parent.name == "data"
