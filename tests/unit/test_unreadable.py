"""What is there and may not be read is named, not taken for missing or for a fault of clusterkit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from clusterkit.evaluate.request import choose_checkpoint
from clusterkit.runs.directory import user_name
from evaluation.config import EvalConfig
from trainer.errors import UserError

AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
"""Root reads everything: without these capabilities it may what everybody may."""


def refused(*words: str | Path) -> tuple[int, str]:
    """Run a module to its end; its exit code and the last lines of what it says."""
    command = [*AS_OTHERS, sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["status", "runs"])
def test_runs_that_may_not_be_listed_are_not_taken_for_none(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "logs" / user_name()
    (folder / "tiny" / "run1").mkdir(parents=True)
    folder.chmod(0)

    code, said = refused("clusterkit", command, "--here", "--fileroot", tmp_path)

    folder.chmod(0o700)
    assert (code, f"cannot use {folder}: Permission denied" in said) == (2, True), said


def test_a_file_that_an_evaluation_may_not_read_is_named(tmp_path: Path) -> None:
    model, request = tmp_path / "model", tmp_path / "request.yaml"
    model.mkdir()
    model.chmod(0)
    config = EvalConfig(model_path=str(model), output_path=str(tmp_path / "out"), data_names=["recall"])
    request.write_text(yaml.safe_dump(config.model_dump()))

    code, said = refused("evaluation", request)

    model.chmod(0o700)
    assert (code, f"cannot use {model}/" in said, "fault of clusterkit" in said) == (2, True, False), said


def test_a_file_in_place_of_a_checkpoint_is_told_by_its_option(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()

    with pytest.raises(UserError, match=f"--model-path {file} is a file: name the folder"):
        choose_checkpoint(str(file), tmp_path)
