"""`clusterkit report`: write the page."""

from __future__ import annotations

import time
from pathlib import Path

from clusterkit.cli.actions.target import RUNS, cluster_of_run, folder_of_runs
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.choose import choose_runs
from clusterkit.runs.directory import RunDirectory
from clusterkit.ui import output
from clusterkit.ui.page_file import write_page


def report(
    experiment: str | None,
    trial: str | None,
    compare: str | None,
    out: str | None,
    fileroot: str | None,
    cluster: str | None,
    here: bool,
    *,
    as_json: bool,
) -> None:
    """Write runs of this machine or of a cluster as one page."""
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    if cluster is not None:
        from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

        with mirror_of(cluster, fileroot or RUNS) as mirror:
            directories = mirror.choose(experiment, trial, compare)
            page, runs = _page(directories)
            page = mirror.told(page)
    else:
        directories = choose_runs(folder_of_runs(fileroot), experiment, trial, compare)
        page, runs = _page(directories)
    if out == "-":
        output.result(page)
        return
    name = "-".join([directories[0].experiment, *(directory.trial for directory in directories)])
    path = write_page(page, Path(out).expanduser() if out else Path(f"{name}.html"))
    if as_json:
        output.result_json({"path": str(path), "bytes": path.stat().st_size, "runs": runs})
    else:
        output.result(str(path))
        output.note("Open it with a web browser; it can be sent or kept as it is.")


def _page(directories: list[RunDirectory]) -> tuple[str, list[str]]:
    """The page, and the names of the runs on it."""
    runs = [RunReader(directory).read() for directory in directories]
    names = [run.name for run in runs]
    return document(" against ".join(names), content(runs, time.time())), names
