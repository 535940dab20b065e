"""What `--model-path` of `eval` and `ask` means on this machine, and how a name that means nothing is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.evaluate.request import checkpoint_here
from trainer.errors import UserError

COMMANDS = {"eval": ["eval", "--data-names", "recall"], "ask": ["ask", "-q", "Who?", "book.txt"]}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("Ann lives here.")
    return tmp_path / "runs"


def refused(command: str, model: str) -> tuple[str, int]:
    """The error, and its exit code."""
    error = CliRunner().invoke(app, [*COMMANDS[command], "--model-path", model]).exception
    assert isinstance(error, UserError)
    return str(error), error.exit_code


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_that_is_not_there_is_told_with_those_that_are(machine: Path, command: str) -> None:
    message, code = refused(command, "7B_n4-math/run1")
    assert (code, message.startswith(f"no run 7B_n4-math/run1 under {machine}, which has no runs")) == (1, True)

    RunWriter(machine).config().attempt()
    RunWriter(machine, trial="run2").config().attempt()

    message, code = refused(command, "7B_n4-math/run1")
    assert code == 1
    assert message.startswith(f"no run 7B_n4-math/run1 under {machine}; runs: tiny-recall/run1, tiny-recall/run2")
    message, code = refused(command, "nosuch")
    assert code == 1
    assert message.startswith(
        "--model-path nosuch is no folder and no asset (smollm2-135m). A run is named EXPERIMENT/"
    )
    assert "runs: tiny-recall/run1, tiny-recall/run2" in message
    message, code = refused(command, "tiny-recall/run2")
    assert code == 1
    assert f"tiny-recall/run2 under {machine} has no checkpoint yet" in message


def test_a_run_means_its_newest_checkpoint_and_an_asset_itself(machine: Path) -> None:
    actor = RunWriter(machine).config().attempt().run.checkpoints / "actor"
    for step in (2, 10):
        folder = actor / f"epoch1epochstep{step}globalstep{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    assert checkpoint_here("tiny-recall/run1", machine) == str(folder)
    assert checkpoint_here(None, machine) == str(folder)
    assert checkpoint_here("smollm2-135m", machine) == "smollm2-135m"
