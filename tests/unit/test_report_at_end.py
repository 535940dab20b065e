"""Where the page of a run that has ended goes: beside its logs, or here where these are on another machine."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter

from clusterkit.backends.records import Runs
from clusterkit.cli.actions.report import write_at_end
from clusterkit.runs.directory import RunDirectory


class Copies(Runs):
    """Runs of `there` as copies, as the mirror of a cluster has them; that it fetches only a cluster can show."""

    def __init__(self, folder: Path, there: Path) -> None:
        super().__init__(folder)
        self.there = there

    def index(self) -> None:
        shutil.copytree(self.there, self.folder)

    def original(self, run: RunDirectory) -> RunDirectory:
        return replace(run, fileroot=self.there)


class Place:
    """As much of a backend as is asked."""

    def __init__(self, runs: Runs) -> None:
        self.found = runs

    def runs(self, fileroot: str) -> Runs:
        return self.found


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_page_is_beside_the_logs_of_a_run_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    writer = RunWriter(there).config().attempt().steps(1, 30).summary().finish()
    place: Any = Place(Copies(tmp_path / "copy", there) if elsewhere else Runs(there))

    page = write_at_end(place, writer.run)

    assert page == (here / "tiny-recall-run1.html" if elsewhere else writer.run.logs / "report.html")
    assert "64 chunks (16 x the longest trained)" in page.read_text()
    assert list(tmp_path.rglob("*.html")) == [page]
