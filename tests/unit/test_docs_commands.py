"""Every command line of README and of the pages under docs/ is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer
from commandline import parsed
from docpages import PAGES, README, lines_of_code, literal

from clusterkit.cli.main import app

TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}


def _cases(found: Callable[[str], list[str]]) -> list[Any]:
    return [
        pytest.param(line, id=f"{page.stem}: {line}")
        for page, text in TEXTS.items()
        for line in literal(found(text))
        if not line.startswith("make ")
    ]


LINES = _cases(lines_of_code)
MENTIONED = _cases(lambda text: re.findall(r"`(clusterkit [^`\n]+)`", text))


def test_readme_is_short_and_its_comparison_links_to_what_its_cells_say() -> None:
    text = TEXTS[README]
    rows = re.search(r"^## Beside what you know\n\n(?:\|.*\n){2}((?:\|.*\n)+)", text, re.MULTILINE)

    assert len(text.splitlines()) < 150
    assert rows is not None
    assert len(rows[1].splitlines()) >= 5
    for row in rows[1].splitlines():
        assert "](docs/" in row.split("|")[2], row


def test_there_are_commands_to_try() -> None:
    assert len(LINES) > 60
    assert len(MENTIONED) > 100


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_of_the_documentation_is_taken(line: str) -> None:
    parsed(typer.main.get_command(app), shlex.split(line)[1:])


@pytest.mark.parametrize("line", MENTIONED)
def test_a_command_that_is_mentioned_exists(line: str) -> None:
    """Arguments may be left out there."""
    try:
        parsed(typer.main.get_command(app), shlex.split(line)[1:])
    except Exception as end:
        if type(end).__name__ != "MissingParameter" and getattr(end, "exit_code", 1) != 0:
            raise
