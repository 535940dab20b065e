"""Which checkpoints a watch scores, and when again."""

from __future__ import annotations

import json
import os
import shutil
from itertools import count
from pathlib import Path

from clusterkit.evaluate.process import WatchOutputParser
from evaluation.watching import watch

TIMES = count(10**18)


def write(folder: Path, step: int) -> Path:
    """A checkpoint as a run gives it its name: whole, in place of what was there."""
    path = folder / f"epoch1epochstep{step}globalstep{step}"
    new = path.with_suffix(".tmp")
    new.mkdir(parents=True)
    (new / "config.json").write_text("{}")
    os.utime(new / "config.json", ns=(0, next(TIMES)))  # a clock of files may stand still for milliseconds
    shutil.rmtree(path, ignore_errors=True)
    return new.rename(path)


def test_a_checkpoint_that_was_replaced_is_scored_again(tmp_path: Path) -> None:
    first, scored, codes = write(tmp_path, 5), list[str](), iter([1, 0, 0])

    def score(checkpoint: Path) -> int:
        scored.append(checkpoint.name)
        if len(scored) == 1:  # while it is scored the run goes back, and writes it and the next one
            assert write(tmp_path, 5) == first
            write(tmp_path, 6)
        return next(codes)

    number, failed = watch(tmp_path, score, lambda: False, lambda **_: None, lambda: True)

    assert scored == [first.name, first.name, "epoch1epochstep6globalstep6"]
    assert (number, failed) == (2, [])


def test_a_checkpoint_whose_inode_numbers_change_is_scored_once(tmp_path: Path) -> None:
    config, scored = write(tmp_path, 5) / "config.json", list[Path]()

    def score(checkpoint: Path) -> int:
        scored.append(checkpoint)
        assert len(scored) == 1
        shutil.copy2(config, tmp_path / "same")
        (tmp_path / "same").replace(config)
        return 0

    assert watch(tmp_path, score, lambda: False, lambda **_: None, lambda: True) == (1, [])


def test_a_checkpoint_that_failed_and_was_then_scored_counts_once_and_as_scored() -> None:
    parser, said = WatchOutputParser((lines := list[str]()).append), "/runs/a/epoch1epochstep5globalstep5"
    for code in (1, 0):
        parser.take(json.dumps({"watch": "scoring", "checkpoint": said}))
        parser.take(json.dumps({"watch": "failed" if code else "scored", "checkpoint": said, "code": code}))
        assert parser.failed == (["epoch1epochstep5globalstep5"] if code else [])

    assert parser.count == 1
    assert lines[1] == "epoch1epochstep5globalstep5 could not be scored (code 1)"
