"""Which files a task is read from: all of them are compared where a run goes on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from slot_writer import write_slot

from clusterkit.config.resolve import resolve
from trainer.checkpoint.fingerprint import DATA, TRACES
from trainer.checkpoint.start import find_start, settings_and_data
from trainer.config import RunConfig
from trainer.config_tasks import AnyTaskConfig
from trainer.errors import UserError
from trainer.launch.local import _ranks
from trainer.launch.ranks import RankedRun
from trainer.metrics import Monitor
from trainer.sft.start import start_config
from trainer.signals import StopFlag
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


def test_a_file_is_read_once_until_its_size_or_time_changes(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("a")
    task = {"name": "mine:Tasks", "path": str(file)}
    first, at = digests(task), file.stat().st_mtime_ns
    file.write_text("b")
    os.utime(file, ns=(at, at))
    assert digests(task) == first
    os.utime(file, ns=(at, at + 1))
    assert digests(task) != first


def own_run(folder: Path, **settings: Any) -> RunConfig:
    """A run on two ranks whose task is read from own.txt of a folder."""
    task = {"name": "mine:Tasks", "path": str(folder / "own.txt")}
    return RunConfig.model_validate({"fileroot": str(folder), "task": task, "train": {"ranks": 2}, **settings})


def test_files_are_read_before_the_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("a")
    config = own_run(tmp_path)
    start = find_start(config, tmp_path / "recover")
    run = _ranks(config, tmp_path, Monitor(tmp_path, 1), 1, StopFlag(), start)
    assert isinstance(run, RankedRun)
    (tmp_path / "own.txt").unlink()

    told = settings_and_data(config, run.start.data)[f"{DATA}own.txt"]
    assert told == f"1 bytes, sha256 {hashlib.sha256(b'a').hexdigest()[:16]}"


@pytest.mark.parametrize(
    ("now", "settings", "named"),
    [
        ("a longer one", {"model": {"path": "/models/a"}}, True),
        ("a longer one", {}, False),  # weights of a model that is made from nothing fit no other run
        ("a longer one", {"model": {"path": "/models/a"}, "seed": 2}, False),
    ],
    ids=["data", "a model from nothing", "settings, too"],
)
def test_data_that_grew_can_be_trained_on_from_the_weights(
    tmp_path: Path, now: str, settings: dict[str, Any], named: bool
) -> None:
    (tmp_path / "own.txt").write_text("a")
    before = own_run(tmp_path, **{**settings, "seed": 1})
    write_slot(tmp_path / "recover", "slot-a", 1, 3, before, data=settings_and_data(before))
    (tmp_path / "own.txt").write_text(now)

    with pytest.raises(UserError, match="written with other settings or data") as told:
        find_start(own_run(tmp_path, **settings), tmp_path / "recover")

    assert f"  {DATA}own.txt: 1 bytes, sha256 " in str(told.value)
    assert ("trial_name=NEW --recover-from CHECKPOINT" in str(told.value)) == named


def test_a_supervised_start_goes_on_with_the_memories_that_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text("{}")
    made = {"task.path": str(tmp_path), "supervised.dataset": "traces.jsonl"}
    config = start_config(
        resolve("135M_read_cpu", None, tuple(f"{name}={value}" for name, value in made.items())).config
    )
    data = settings_and_data(config)
    known = {name: value for name, value in data.items() if name.startswith(DATA)}

    write_slot(tmp_path / "same", "slot-a", 1, 3, config, data=data)
    assert find_start(config, tmp_path / "same").notes == ()
    write_slot(tmp_path / "earlier", "slot-a", 1, 3, config, data=known)
    (told,) = find_start(config, tmp_path / "earlier").notes
    assert "from here on they have 2 where traces.jsonl says no other number" in told
    write_slot(tmp_path / "three", "slot-a", 1, 3, config, data={**data, TRACES: "3 sentences"})
    with pytest.raises(UserError, match="memories of traces: 3 sentences -> 2 sentences"):
        find_start(config, tmp_path / "three")
    (tmp_path / "traces.jsonl").write_text('{"sentences": 4}')
    with pytest.raises(UserError, match=f"{DATA}traces.jsonl: 2 bytes"):
        find_start(config, tmp_path / "same")
