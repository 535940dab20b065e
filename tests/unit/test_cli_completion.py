"""What may follow the words of a command line; test_completion_shells.py types it into real shells."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.actions.completion import candidates
from clusterkit.cli.main import COMMANDS, app


def _words(line: str) -> list[str]:
    """The candidates for the last word of a line, without what they mean."""
    return [word for word, _ in candidates(line.split(" "))]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("serve ", ["list", "add", "stop", "judge"]),
        ("train --preset tiny --task ", ["recall", "sft"]),
        ("train --preset=ti", ["--preset=tiny"]),
        ("presets show ti", ["tiny"]),
        ("train trainer.type=", ["trainer.type=grpo", "trainer.type=sft", "trainer.type=null"]),
        ("setup --set train.learning_r", ["train.learning_rate="]),
        ("eval --set num_q", ["num_questions="]),
        ("eval --set server.engine=em", ["server.engine=embedded"]),
        ("ask -q x --set train.l", []),
        ("presets explain tiny train.learning_r", ["train.learning_rate"]),
        ("serve judge --engine ", ["sglang", "vllm"]),
        ("stop --dead", ["--deadline"]),
        ("assets get smo", ["smollm2-135m"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("status --trial run1 --w", ["--watch"]),
        ("ask ", []),
        ("nonsense ", []),
    ],
)
def test_what_may_come_next(line: str, wanted: list[str]) -> None:
    found = _words(line)

    assert found == wanted


def test_what_a_command_does_is_not_cut_off() -> None:
    assert [meaning for _, meaning in candidates(["serve", ""]) if meaning.endswith("...")] == []


def test_all_commands_come_first_and_options_after_a_dash() -> None:
    assert _words("") == list(COMMANDS)
    assert "--partition" in _words("train --")
    assert "--config" not in _words("train --"), "what is refused anyway is offered"


def test_runs_are_those_of_the_folder_and_experiment_that_were_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for experiment, trial in (("a", "one"), ("b", "two")):
        RunWriter(tmp_path / "there", experiment, trial)

    assert _words("status --trial ") == []
    assert sorted(_words("status --fileroot there --trial ")) == ["one", "two"]
    assert _words("status --fileroot there --experiment b --trial ") == ["two"]
    assert _words("report --fileroot there --compare a/") == ["a/one"]
    assert sorted(_words("status --fileroot there --experiment ")) == ["a", "b"]


def test_a_shell_without_a_script_is_named() -> None:
    refused = CliRunner().invoke(app, ["completion", "tcsh"])

    assert "there is no completion for tcsh: name one of bash, zsh, fish" in str(refused.exception)
