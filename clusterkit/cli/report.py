"""`clusterkit report`: a run as one web page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterkit.cli.target import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION, RUNS, cluster_of_run, folder_of_runs
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.runs.directory import RunDirectory

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def report(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    compare: str | None = typer.Option(
        None, "--compare", help="A second run to draw beside it.", metavar="TRIAL or EXPERIMENT/TRIAL"
    ),
    out: str | None = typer.Option(
        None, "--out", help="The file to write, or - for stdout; EXPERIMENT-TRIAL.html here when left out."
    ),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = CLUSTER_OPTION,
    here: bool = HERE_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write a run's rewards, lengths, times, checkpoints and restarts as one web page that needs nothing else.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which.
    """
    from clusterkit.runs.choose import choose_runs  # noqa: PLC0415
    from clusterkit.ui.page_file import write_page  # noqa: PLC0415

    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    if cluster is not None:
        from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415

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
    from clusterkit.observe.report.page import content, document  # noqa: PLC0415
    from clusterkit.observe.report.source import RunReader  # noqa: PLC0415

    runs = [RunReader(directory).read() for directory in directories]
    names = [run.name for run in runs]
    return document(" against ".join(names), content(runs, time.time())), names
