"""Every command line of README and of the pages under docs/ is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import parsed

from clusterkit.cli.main import app

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
WAYS = re.compile(r"[…·|]|\[(?=[A-Z-])")
"""In a command that stands for several: something left out, alternatives, `[--option]`."""


COMMENT = re.compile(r"\s+#\s|\s{3,}|\s[|>&]\s")


def lines_of_code(text: str) -> list[str]:
    """The lines of code blocks that begin with `clusterkit`."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return [
        *re.findall(r"^ {4}(clusterkit .*)$", text, re.MULTILINE),
        *re.findall(r"^(clusterkit .*)$", fenced, re.MULTILINE),
    ]


def literal(page: Path, lines: list[str]) -> list[Any]:
    """Those that can be typed as they stand, without what explains them."""
    typed = dict.fromkeys(COMMENT.split(re.sub(r"\\\s+", "", line))[0].strip() for line in lines)
    return [pytest.param(line, id=f"{page.stem}: {line}") for line in typed if not WAYS.search(line)]


TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
LINES = [line for page, text in TEXTS.items() for line in literal(page, lines_of_code(text))]
MENTIONED = [
    line for page, text in TEXTS.items() for line in literal(page, re.findall(r"`(clusterkit [^`\n]+)`", text))
]


def test_readme_is_short_and_its_comparison_links_to_what_its_cells_say() -> None:
    text = TEXTS[REPOSITORY / "README.md"]
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
