"""`clusterkit COMMAND --help` says what the command is for."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from clusterkit.cli.main import COMMANDS, app


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_says_what_it_is_for_in_sentences(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"])

    assert shown.exit_code == 0, shown.output
    usage, _, rest = shown.output.partition("\n\n")
    assert usage.startswith("Usage: ")
    assert "[[" not in usage
    assert not rest.startswith(("Options:", "Arguments:", "Commands:")), "it begins with options, not with a sentence"
