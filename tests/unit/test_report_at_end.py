"""Where the page of a run that has ended goes: beside its logs, and nowhere where these are on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

from clusterkit.backends.records import Runs
from clusterkit.cli.actions.report import write_at_end
from clusterkit.runs.directory import RunDirectory


class Place:
    """As much of a backend as is asked."""

    def __init__(self, runs: Runs) -> None:
        self.found = runs

    def runs(self, fileroot: str) -> Runs:
        return self.found


def test_a_page_is_beside_the_logs_of_a_run(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config().attempt().steps(1, 30).summary().finish()
    place: Any = Place(Runs(tmp_path))

    page = write_at_end(place, writer.run)

    assert page == writer.run.logs / "report.html"
    assert "64 chunks (16 x the longest trained)" in page.read_text()


def test_no_page_is_written_of_a_run_on_other_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = RunDirectory(tmp_path / "storage", "root", "tiny-recall", "run1")
    place: Any = Place(Runs(tmp_path / "copy"))
    assert write_at_end(place, there) is None
    assert not list(tmp_path.iterdir())
