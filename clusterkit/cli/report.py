"""`clusterkit report`: a run as one web page."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION

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
    actions.report.report(experiment, trial, compare, out, fileroot, cluster, here, as_json=as_json)
