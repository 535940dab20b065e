"""What a run that is interrupted says of what is kept, and of how to go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builders import small_config

from trainer.base_run import Attempt, SteppedRun
from trainer.checkpoint.start import Start
from trainer.errors import InterruptedRunError
from trainer.loop import TrainingRun
from trainer.metrics import Monitor
from trainer.start_mark import mark_done
from trainer.train.distributed import single_world


class Run(TrainingRun):
    """A run that is stopped before its parts are built."""

    def __init__(self, attempt: Attempt) -> None:
        SteppedRun.__init__(self, attempt)

    def run(self) -> None:
        self._agree_to_go_on()


@pytest.mark.parametrize(
    ("dataset", "mode", "done", "kept"),
    [
        ("traces.jsonl", "auto", True, "its supervised start is done and kept; the same command"),
        (
            "traces.jsonl",
            "disabled",
            True,
            "its supervised start is done and kept; the same command without recover_mode=disabled",
        ),
        ("traces.jsonl", "auto", False, "no step was finished yet; the same command"),
        ("", "auto", True, "no step was finished yet; the same command"),  # an earlier run of this name had one
    ],
)
def test_before_its_first_step_a_run_says_whether_its_supervised_start_is_kept(
    tmp_path: Path, dataset: str, mode: str, done: bool, kept: str
) -> None:
    config = small_config(f"fileroot={tmp_path}", f"recover_mode={mode}")
    config = config.model_copy(update={"supervised": config.supervised.model_copy(update={"dataset": dataset})})
    run = Run(Attempt(config, tmp_path, single_world(), Monitor(tmp_path, 1), lambda: True, Start(None)))
    if done:
        start = run.paths.supervised
        for folder in (start.logs, start.checkpoints):
            folder.mkdir(parents=True)
        (start.checkpoints / "config.json").write_text("{}")
        mark_done(start, {}, "", {})

    with pytest.raises(InterruptedRunError, match=re.escape(f"interrupted after step 0: {kept} goes on from there")):
        run.run()
