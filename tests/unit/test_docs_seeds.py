"""docs/coming-from-areal.md: every line is tried, and the guides that it answers are searched for what it lacks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from commandline import parsed
from realparts import data_is_missing
from typer.testing import CliRunner

from clusterkit.cli.hostoptions import expand_arguments
from clusterkit.cli.main import app
from clusterkit.config.aliases import ALIASES, RefusedSetting, Renamed
from clusterkit.config.fields import fields
from clusterkit.config.overrides import known_field, parse_overrides, parse_value
from clusterkit.config.resolve import resolve
from trainer.config import flatten
from trainer.errors import UserError

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "coming-from-areal.md"
NOTHING = ("nothing",)
OURS_BY_RUNNING = ("show", "explain", "convert")


@dataclass(frozen=True)
class Line:
    """One line of a table. there, here: what stands between backticks in its first and second column."""

    number: int
    chapter: str
    there: tuple[str, ...]
    here: tuple[str, ...]
    mark: str
    cells: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number}-{self.there[0] if self.there else self.cells[0][:20]}"


def table() -> list[Line]:
    lines, chapter = [], ""
    for number, text in enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1):
        if text.startswith("## "):
            chapter = text[3:]
        if not text.startswith("| ") or text == "| there | here | remark |":
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", text)[1:-1]]
        there, here = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[:2])
        mark = next((mark for mark in "✓✗" if mark in cells[0]), "")
        lines.append(Line(number, chapter, there, here, mark, tuple(cells)))
    return lines


LINES = table()


@pytest.fixture(scope="module")
def group() -> Any:
    return typer.main.get_command(app)


@pytest.fixture(scope="module")
def seeds() -> dict[str, str]:
    """The guides by the first digits of their names."""
    folder = REPOSITORY.parent / "shared" / "reference" / "seeds"
    if not folder.is_dir():
        data_is_missing(f"no guides in {folder}")
    return {path.name[:3]: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")}


def test_every_line_has_three_columns_and_an_answer() -> None:
    assert len(LINES) > 180
    assert "not yet" not in PAGE.read_text(encoding="utf-8")
    for line in LINES:
        assert len(line.cells) == 3, line
        assert line.here or line.cells[1] in NOTHING, line


@pytest.mark.parametrize("line", [line for line in LINES if line.here], ids=str)
def test_what_is_named_here_exists(line: Line, group: Any) -> None:
    for word in line.here:
        if word.startswith("clusterkit "):
            try_command(word, group)
        elif word.startswith("make "):
            assert f"\n{word[5:]}:" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")
        elif word.isupper():
            assert any(word in path.read_text(encoding="utf-8") for path in (REPOSITORY / "trainer").glob("*.py"))
        else:
            key, equals, value = word.partition("=")
            assert known_field(key)
            if equals:
                parse_value(known_field(key), value)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_commands_in_remarks_exist(line: Line, group: Any) -> None:
    for word in re.findall(r"`(clusterkit [^`]+)`", line.cells[2]):
        try_command(word, group)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_settings_and_pages_in_remarks_exist(line: Line) -> None:
    for word in re.findall(r"`([a-z_]+\.[a-z_.]+)(?:=[^`]*)?`", line.cells[2]):
        key = word.partition("=")[0]
        assert key in fields() or key in ALIASES or key.startswith(("progress.", "agent.options.")), key
    for page in re.findall(r"\]\(([a-z-]+\.md)\)", line.cells[2]):
        assert (PAGE.parent / page).is_file()


def test_commands_around_the_tables_exist(group: Any) -> None:
    text = "\n".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if not line.startswith("|"))
    commands = [word for word in re.findall(r"`(clusterkit [^`]+)`", text) if "NAME" not in word]
    assert len(commands) >= 2
    for command in commands:
        try_command(command, group)


def try_command(text: str, group: Any) -> None:
    """Parse it; resolve what a `train` or `setup` means; run what only prints."""
    words = shlex.split(text)[1:]
    typed = parsed(group, words)
    if preset := typed.get("preset"):
        resolve(preset, typed.get("task"), [*(typed.get("overrides") or []), *(typed.get("settings") or [])])
    if words[0] == "presets" and words[1] in (*OURS_BY_RUNNING, "plan"):
        done = CliRunner().invoke(app, words)
        assert done.exit_code in ((0, 1) if words[1] == "plan" else (0,)), done.output
        assert done.output


@pytest.mark.parametrize("line", [line for line in LINES if line.mark], ids=str)
def test_a_mark_says_what_becomes_of_the_old_spelling(line: Line) -> None:
    for old in line.there:
        if old.startswith("--"):
            words = expand_arguments(["setup", old, "x"])
            assert words[1].startswith(("--private-key-file", "--ssh-port", "--username", "--hostnames", "--preset"))
            continue
        key = old.lstrip("+").partition("=")[0]
        alias = ALIASES.get(key)
        if line.mark == "✗":
            with pytest.raises(UserError):
                parse_overrides([old if "=" in old else f"{old}=x"])
            assert isinstance(alias, RefusedSetting) or "=" in old
            continue
        assert alias is not None or key in fields(), old
        assert not isinstance(alias, RefusedSetting)
        if isinstance(alias, Renamed):
            targets = {*alias.keys, *alias.beside}
            named = {word.partition("=")[0] for word in line.here if not word.startswith("clusterkit")}
            assert named == targets or not named, f"{old}: {named} on the page, {targets} in the table of aliases"


@pytest.mark.parametrize("line", [line for line in LINES if line.mark == "✓"], ids=str)
def test_an_old_value_becomes_the_value_on_the_page(line: Line) -> None:
    for old in line.there:
        if "=" not in old or old.startswith("--") or "$" in old:
            continue
        values = parse_overrides([shlex.split(old)[0]])
        for word in line.here:
            key, equals, value = word.partition("=")
            if equals and not key.startswith("clusterkit"):
                assert values[key] == parse_value(known_field(key), value)


def words_of(chapter: str) -> set[str]:
    """Every word of a chapter's first column, settings without their values."""
    cells = [cell for line in LINES if line.chapter == chapter for cell in line.there]
    return {word.lstrip("+").partition("=")[0] for cell in cells for word in cell.split()}


SETTINGS = re.compile(r"(?<![\w./?-])\+?((?:[a-z_]+\.)*[a-z_]+)=(?=[\w<$'\[/])")
VARIABLES = re.compile(r"\b([A-Z][A-Z_]{3,})=|^export ([A-Z_]+)|`([A-Z_]{5,})`", re.MULTILINE)
CODE = re.compile(r"\(|.*[(,]$| +default|\+? {7}(?!-)")
"""Lines that a program prints, and lines of Python."""


@pytest.mark.parametrize(
    ("seed", "chapter"),
    [
        ("000", "Mem-alpha on AReaL"),
        ("001", "MemAgent on vime"),
        ("002", "AReaLite"),
        ("003", "MemAgent on verl"),
        ("004", "AReaL v0.2"),
    ],
)
def test_no_option_or_variable_of_a_guide_is_left_out(seed: str, chapter: str, seeds: dict[str, str]) -> None:
    text = "\n".join(line for line in seeds[seed].splitlines() if not CODE.match(line))
    settings = set(SETTINGS.findall(text))
    options = {f"--{name}" for name in re.findall(r"(?<!\S)`?--([a-z][\w-]+)", text)}
    variables = {name for found in VARIABLES.findall(text) for name in found if name}
    assert settings | options | variables
    assert sorted((settings | options | variables) - words_of(chapter)) == []


def test_the_tutorials_own_list_of_parameters_is_answered(seeds: dict[str, str]) -> None:
    named = re.findall(r"^\+ `([^`]+)`: ", seeds["004"], re.MULTILINE)
    keys = [key for name in named for key in braces(name) if re.fullmatch(r"[a-z_.]+", key)]
    answered = {word for line in LINES if line.chapter == "AReaL v0.2" for word in line.there}
    assert len(keys) > 20
    assert set(keys) <= answered


def braces(name: str) -> list[str]:
    """`exp_ctrl.save_freq_{epochs|steps}` -> both."""
    found = re.search(r"\{([^}]*)\}", name)
    return [name.replace(found[0], part) for part in found[1].split("|")] if found else [name]


def test_the_verl_script_is_our_preset(seeds: dict[str, str]) -> None:
    body = seeds["003"].partition("verl.trainer.main_ppo")[2].partition("2>&1")[0]
    variables = {
        "TRAIN_PATH": "/t.parquet",
        "VAL_PATH": "/v.parquet",
        "MODEL_PATH": "Qwen/Qwen2.5-0.5B-Instruct",
        "MAXLEN": "8192",
        "MAX_NEW_TOKEN": "1024",
        "WAND_PROJECT": "memory-agent",
        "EXP": "memory_agent/0.5B",
        "PROJ_DIR": "/results",
        "NGPUS_PER_NODE": "4",
        "NNODES": "1",
    }
    body = re.sub(r"\$\{?([A-Z_]+)\}?", lambda found: variables[found[1]], body)
    typed = [word for word in shlex.split(body.replace("\\", " ")) if "=" in word]
    assert len(typed) == 61
    refused = [word for word in typed if isinstance(ALIASES[word.lstrip("+").partition("=")[0]], RefusedSetting)]
    with pytest.raises(UserError) as caught:
        resolve("0.5B", None, typed)
    assert len(str(caught.value).splitlines()) == len(refused) == 4

    ours = flatten(resolve("0.5B").config)
    theirs = flatten(resolve("0.5B", None, [word for word in typed if word not in refused]).config)

    assert {key for key in ours if ours[key] != theirs[key]} == {
        "experiment_name",
        "fileroot",
        "monitor.wandb_project",
        "task.path",
    }
