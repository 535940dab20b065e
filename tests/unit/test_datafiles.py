"""Which files a task is read from: all of them are compared where a run goes on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from trainer.config import RunConfig
from trainer.config_tasks import AnyTaskConfig
from trainer.errors import UserError
from trainer.tasks.datafiles import data_digests

PAIR = ("documents.jsonl", "questions.jsonl")


def digests(task: dict[str, Any]) -> dict[str, str]:
    """Of a run of this task; its other settings need not go with it."""
    section = TypeAdapter(AnyTaskConfig).validate_python(task)
    return data_digests(RunConfig().model_copy(update={"task": section}))


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ({"name": "hotpotqa"}, PAIR),
        ({"name": "hotpotqa"}, ("documents.jsonl.gz", "questions.jsonl")),
        ({"name": "hotpotqa"}, tuple(f"{side}/{name}" for side in ("dev", "test", "train") for name in PAIR)),
        ({"name": "hotpotqa"}, ("hotpotqa_dev.parquet", "hotpotqa_train_32k.parquet")),
        ({"name": "math", "dataset": "problems.jsonl"}, ("problems.jsonl",)),
        ({"name": "memalpha"}, ("test.jsonl", "train.parquet")),
    ],
)
def test_the_files_of_a_folder(tmp_path: Path, task: dict[str, Any], files: tuple[str, ...]) -> None:
    for name in (*files, "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"of {name}")
    found = digests({**task, "path": str(tmp_path)})

    assert tuple(sorted(found)) == files
    for name, digest in found.items():
        text = f"of {name}".encode()
        assert digest == f"{len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()[:16]}"


def test_a_file_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("a")
    for task in ({"name": "math"}, {"name": "mine:Tasks"}):
        assert list(digests({**task, "path": str(file)})) == ["own.txt"]
    for task in ({"name": "recall"}, {"name": "mine:Tasks", "path": str(tmp_path)}):
        assert digests(task) == {}


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.jsonl: cannot be read \(No such file"):
        digests({"name": "sft", "path": str(tmp_path / "gone.jsonl")})
