"""`clusterkit report`: write the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.base import Backend
from clusterkit.backends.records import Runs
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.observe.report.log_source import LogRun
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.rollouts import shown_files
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.reader import cache_folder, log_reader
from clusterkit.ui import output
from clusterkit.ui.page_file import write_page


def report(run: RunOptions, compare: Sequence[str], out: str | None, *, as_json: bool) -> None:
    """Write a run, and those of `compare` over it, as one page. out: the file, or - for stdout."""
    with open_backend(place_of_run(run), output.note) as backend:
        runs = backend.runs()
        directories = runs.choose(run.experiment, run.trial, compare)
        page = _page_of(runs, directories)
    _write(page, _file_name(directories), [directory.name for directory in directories], out, as_json)


def write_at_end(backend: Backend, run: RunDirectory) -> Path | None:
    """Write the page of a run that has ended beside its logs, and return where; None: these are on another machine.

    Raises:
        UserError: the file may not be written. RunError: the disk is full.
    """
    if not run.logs.is_dir():
        return None
    runs = backend.runs(str(run.fileroot))
    return write_page(_page_of(runs, runs.choose(run.experiment, run.trial)), run.logs / "report.html")


def write_comparison(runs: Runs, directories: Sequence[RunDirectory]) -> Path | None:
    """Write the page of a sweep's trials beside their folders, and return where; None: these are on another machine.

    Raises:
        UserError: the file may not be written. RunError: the disk is full.
    """
    if any(runs.original(directory) != directory for directory in directories):
        return None
    return write_page(_page_of(runs, directories), directories[0].logs.parent / "sweep.html")


def _page_of(runs: Runs, directories: Sequence[RunDirectory]) -> str:
    """Return the page of runs that are up to date."""
    for directory in directories:
        runs.fetch_heldout(directory)
        runs.index_steps(directory)
        for _, file in shown_files(directory)[-1:]:  # of a cluster's run only the newest: they may be large
            runs.fetch_step(file)
    read = [RunReader(directory).read() for directory in directories]
    title = " against ".join(one.name for one in read)
    return runs.with_original_paths(document(title, content(read, time.time())))


def _file_name(directories: Sequence[RunDirectory]) -> str:
    return "-".join([directories[0].experiment, *(directory.trial for directory in directories)])


def report_log(log: str, run: RunOptions, compare: Sequence[str], out: str | None, *, as_json: bool) -> None:
    """Write what a log says of a run as one page. log: the file, or - for standard input."""
    run.require_no_run(*(["--compare"] if compare else []))
    path = Path(log) if log == "-" else Path(log).expanduser()
    found = LogRun(log_reader(path, cache_folder()).refresh())
    page = document(found.name, content([found], time.time()))
    _write(page, "log" if log == "-" else path.stem, [found.name], out, as_json)


def _write(page: str, name: str, runs: list[str], out: str | None, as_json: bool) -> None:
    """Write a page and say where; name: of its file where --out names none."""
    if out == "-":
        output.exact(page)
        return
    path = write_page(page, Path(out).expanduser() if out else Path(f"{name}.html"))
    if as_json:
        output.result_json({"path": str(path), "bytes": path.stat().st_size, "runs": runs})
    else:
        output.result(str(path))
        output.note("Open it with a web browser; it can be sent or kept as it is.")
