"""Fixtures that several groups of tests share: data files, a small data set of our own, a real small model."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from realparts import data_is_missing, require, write_jsonl

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile(
    "clusterkit", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("clusterkit")

REPOSITORY = Path(__file__).parents[1]

PEOPLE = ["Ada Quill", "Bo Marsh", "Cleo Finch", "Dov Tarn", "Edda Rook", "Finn Sorrel", "Gwen Alder", "Hal Brook"]
PEOPLE += ["Ida Thorn", "Jon Vale", "Kit Lark", "Lena Moss"]
TOWNS = ["Arnby", "Belk", "Corvale", "Dunmere", "Eskow", "Fallory", "Greth", "Holmsund", "Istria Bay", "Jarrow Fen"]
TOWNS += ["Kelmar", "Lindow"]
RIVERS = ["Ouzel", "Pell", "Quern", "Rushy", "Sable", "Tamsin", "Ulver", "Vine", "Wend", "Xanten", "Yarrow", "Zell"]


def pytest_configure() -> None:
    """Collect tests without the garbage collector, as `trainer.entry.quick_imports`: a third of the seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have it look at what the tests make."""
    gc.freeze()
    gc.enable()


LATE: list[str] = []
"""Tests that were left out because $CLUSTERKIT_TEST_UNTIL (seconds since 1970) was over."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a long test that would begin when time is over, rather than have all be lost to a limit of CI's."""
    until = float(os.environ.get("CLUSTERKIT_TEST_UNTIL") or "inf")
    if item.get_closest_marker("long") and time.time() > until:
        LATE.append(item.nodeid)
        pytest.skip("no time is left")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name them, so that nobody takes them for tests that passed."""
    for nodeid in LATE:
        terminalreporter.write_line(f"LEFT OUT, no time was left: {nodeid}", red=True)


@pytest.fixture(scope="session", autouse=True)
def no_clusters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The clusters of whoever runs the tests are none of theirs: commands would go there."""
    os.environ["CLUSTERKIT_CONFIG"] = str(tmp_path_factory.mktemp("no-clusters"))
    os.environ.pop("CLUSTERKIT_CLUSTER", None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the data files: $CLUSTERKIT_TEST_DATA, or ../shared/data beside the repository."""
    folder = Path(os.environ.get("CLUSTERKIT_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
    if not (folder / "hotpotqa").is_dir():
        data_is_missing(f"no data files in {folder}: set CLUSTERKIT_TEST_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Folder of SmolLM2-135M-Instruct, fetched and converted once per cache ($CLUSTERKIT_CACHE or the default one)."""
    command = [sys.executable, "-m", "clusterkit.cli.main", "assets", "get", "smollm2-135m", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        data_is_missing(f"SmolLM2 could not be fetched: {done.stderr[-2000:]}")
    return Path(json.loads(done.stdout)["path"])


def mini_hotpotqa_rows() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """A dozen two-hop questions of our own and 40 documents in the schema of the HotpotQA files.

    Question n asks for the river of the town where a person was born. It owns that person, that town (both gold) and
    the river; nobody owns the four fruits. No two questions share a document.
    """
    documents: list[dict[str, object]] = []
    for n, (person, town, river) in enumerate(zip(PEOPLE, TOWNS, RIVERS, strict=True)):
        documents.append({"id": f"p{n}", "title": person, "text": f"{person} is a painter who was born in {town}."})
        documents.append({"id": f"t{n}", "title": town, "text": f"{town} is a town on the river {river}."})
        documents.append({"id": f"r{n}", "title": river, "text": f"The {river} is a river; swans nest on its banks."})
    for n, fruit in enumerate(["pear", "plum", "quince", "medlar"]):
        documents.append({"id": f"x{n}", "title": fruit, "text": f"The {fruit} ripens late and keeps until spring."})
    questions: list[dict[str, object]] = [
        {
            # With these ids the default split gives 8 training, 2 dev (6, 7) and 2 test (1, 10) questions.
            "id": f"mini-i{n}",
            "question": f"On which river is the town where {person} was born?",
            "answers": [RIVERS[n]],
            "gold_titles": [person, TOWNS[n]],
            "supporting": [f"p{n}", f"t{n}"],
            "own_documents": [f"r{n}", f"p{n}", f"t{n}"],
            "source": "mini",
        }
        for n, person in enumerate(PEOPLE)
    ]
    return questions, documents


@pytest.fixture
def mini_hotpotqa(tmp_path: Path) -> Path:
    """Folder with the small data set, for tests that must run without any download."""
    folder = tmp_path / "mini_hotpotqa"
    folder.mkdir()
    questions, documents = mini_hotpotqa_rows()
    write_jsonl(folder / "questions.jsonl", questions)
    write_jsonl(folder / "documents.jsonl", documents)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of its own, so that a full disk is a real one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    require(not made.returncode, f"a real full disk needs the right to mount a tmpfs: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=300)
