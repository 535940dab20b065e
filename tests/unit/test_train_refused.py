"""A `train` command that its trainer refuses at once: a run of other settings stays as it was."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from clusterkit.backends.local.train import follow, prepared
from clusterkit.config.resolve import resolve
from clusterkit.runs.status import observe
from clusterkit.runs.trials import run_directory
from clusterkit.ui.progress import PlainLines

REFUSES = "import sys; print('error: written with other settings', file=sys.stderr); sys.exit(2)"


@pytest.mark.parametrize("other", [True, False])
def test_a_refused_command_leaves_a_run_of_other_settings_as_it_was(tmp_path: Path, other: bool) -> None:
    config = resolve("tiny", None, [f"fileroot={tmp_path}"]).config
    run = run_directory(config, "run1")
    with pytest.raises(KeyboardInterrupt), prepared(run, config):
        raise KeyboardInterrupt
    before = run.config.read_bytes()

    given = resolve("tiny", None, [f"fileroot={tmp_path}", *["seed=7"] * other]).config
    with prepared(run, given) as attempt:
        assert (run.config.read_bytes() != before) == other
        outcome = follow(run, [sys.executable, "-c", REFUSES], attempt, PlainLines(), "clusterkit train")

    assert (outcome.exit_code, outcome.message.split("\n")[0]) == (2, "error: written with other settings")
    assert run.config.read_bytes() == before
    # With its own settings the run itself cannot go on, which its status tells.
    assert run.attempt_numbers() == ([1] if other else [1, 2])
    assert observe(run, time.time()).state == ("interrupted" if other else "failed")
