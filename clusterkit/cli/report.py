"""`clusterkit report`: a run as one web page."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from clusterkit.cli import output

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
    fileroot: str = typer.Option("runs", "--fileroot", help="Folder under which runs are."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write a run's rewards, lengths, times, checkpoints and restarts as one web page that needs nothing else."""
    from clusterkit.report.choose import choose_runs  # noqa: PLC0415
    from clusterkit.report.page import content, document  # noqa: PLC0415
    from clusterkit.report.source import RunReader  # noqa: PLC0415
    from clusterkit.report.write import write_page  # noqa: PLC0415

    directories = choose_runs(Path(fileroot).expanduser().absolute(), experiment, trial, compare)
    runs = [RunReader(directory).read() for directory in directories]
    page = document(" against ".join(run.name for run in runs), content(runs, time.time()))
    if out == "-":
        output.result(page)
        return
    name = "-".join([directories[0].experiment, *(directory.trial for directory in directories)])
    path = write_page(page, Path(out).expanduser() if out else Path(f"{name}.html"))
    if as_json:
        output.result_json({"path": str(path), "bytes": path.stat().st_size, "runs": [run.name for run in runs]})
    else:
        output.result(str(path))
        output.note("Open it with a web browser; it can be sent or kept as it is.")
