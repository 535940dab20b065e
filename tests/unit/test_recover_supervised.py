"""`clusterkit recover check` of a run that was stopped in its supervised start."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_writer import RunWriter

from clusterkit.config.resolve import resolve
from clusterkit.runs.recovery import Check
from trainer.checkpoint.slots import look


@pytest.mark.parametrize("kept", [1, 2], ids=["a recover checkpoint of it", "it is done"])
def test_a_start_goes_on_with_the_supervised_start_that_is_kept(tmp_path: Path, kept: int) -> None:
    run = RunWriter(tmp_path).attempt().run
    config = resolve("tiny").config

    def check(*overrides: str) -> Check:
        return Check(run, look(run.recover), resolve("tiny", None, overrides).config if overrides else config)

    assert check().verdict == "there is no recover checkpoint: a start begins at the beginning"
    file = run.what_is_kept[kept]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")

    assert check().verdict.endswith("a start goes on with its supervised start")
    assert check().advice.startswith("repeat the train command")
    assert not check().fits, "nothing of it was compared"
    assert check("recover_mode=disabled").verdict.endswith("a start begins at the beginning")
