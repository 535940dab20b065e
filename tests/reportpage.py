"""Write the page of runs, for a browser to open."""

from __future__ import annotations

from pathlib import Path

from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.directory import RunDirectory


def write_report(folder: Path, *directories: RunDirectory) -> str:
    file = folder / "report.html"
    file.write_text(document("a report", content([RunReader(one).read() for one in directories], 1.8e9)))
    return file.as_uri()
