"""docs/architecture.md: what it names is in the tree, and no package is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
TOPS = sorted(path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith("."))
ROOTS = ("clusterkit", "trainer", "evaluation")
TABLE = "| to change or add | go to | what is there |"
LAYOUT_LINE = re.compile(r"    (?P<indent>(?:  )*)(?P<name>[\w.]+/?)(?: +\S.*)?")


def section(title: str) -> list[str]:
    """The lines under a heading."""
    lines = PAGE.splitlines()
    start = lines.index(f"## {title}") + 1
    end = next((place for place in range(start, len(lines)) if lines[place].startswith("## ")), len(lines))
    return lines[start:end]


def destinations() -> list[tuple[str, list[str]]]:
    """What is to be changed, and the paths of its second column."""
    rows = [line for line in section("Where do I change X") if line.startswith("| ") and line != TABLE]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [(what, re.findall(r"`([^`]+)`", go_to)) for what, go_to, _ in cells]


def layout() -> list[str]:
    """Paths of the layout lists: a name stands below the last one that is indented less."""
    paths: list[str] = []
    above: list[str] = []
    for title in ("The rooms of clusterkit/", "The rooms of trainer/ and evaluation/"):
        for line in section(title):
            if not line.startswith("    "):
                continue
            found = LAYOUT_LINE.fullmatch(line)
            assert found is not None, f"no line of a layout list: {line}"
            above = [*above[: len(found["indent"]) // 2], found["name"]]
            paths.append("".join(above))
    return paths


def packages() -> list[str]:
    found = [init.parent.relative_to(REPOSITORY) for root in ROOTS for init in (REPOSITORY / root).rglob("__init__.py")]
    return sorted(f"{path.as_posix()}/" for path in found)


def is_there(path: str) -> bool:
    """A name with a slash at its end has to be a folder, another one a file."""
    place = REPOSITORY / path
    return place.is_dir() if path.endswith("/") else place.is_file()


def test_the_table_and_the_lists_are_read() -> None:
    assert TABLE in PAGE
    assert len(destinations()) >= 20
    assert len(layout()) > len(packages())


@pytest.mark.parametrize(("what", "paths"), destinations(), ids=[what for what, _ in destinations()])
def test_each_change_has_one_place_that_exists(what: str, paths: list[str]) -> None:
    assert len(paths) == 1, f"{what}: {paths}"
    assert is_there(paths[0]), f"{what}: {paths[0]} is not in the tree"


def test_what_the_layout_lists_name_exists() -> None:
    assert [path for path in layout() if not is_there(path)] == []


def test_every_package_is_in_the_layout_lists() -> None:
    assert [path for path in packages() if path not in layout()] == []


def test_no_name_stands_twice_in_the_layout_lists() -> None:
    assert len(set(layout())) == len(layout())


@pytest.mark.parametrize("page", ["architecture.md", "training-step.md"])
def test_paths_in_the_text_exist(page: str) -> None:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    named = [word for word in re.findall(r"`([\w./-]+)`", text) if word.partition("/")[0] in TOPS and "/" in word]
    assert named
    assert [path for path in named if not is_there(path)] == []


@pytest.mark.parametrize("page", ["architecture.md", "training-step.md"])
def test_linked_pages_exist(page: str) -> None:
    links = re.findall(r"\]\(([\w.-]+\.md)\)", (REPOSITORY / "docs" / page).read_text(encoding="utf-8"))
    assert [link for link in links if not is_there(f"docs/{link}")] == []
