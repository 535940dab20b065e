"""Which checkpoints a watch scores, and when again."""

from __future__ import annotations

import shutil
from pathlib import Path

from evaluation.watching import watch


def write(folder: Path, step: int) -> Path:
    """A checkpoint as a run gives it its name: whole, in place of what was there."""
    path = folder / f"epoch1epochstep{step}globalstep{step}"
    new = path.with_suffix(".tmp")
    new.mkdir(parents=True)
    (new / "config.json").write_text("{}")
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

    count, failed = watch(tmp_path, score, lambda: False, lambda **_: None, lambda: True)

    assert scored == [first.name, first.name, "epoch1epochstep6globalstep6"]
    assert (count, failed) == (2, [])
