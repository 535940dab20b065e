"""`clusterkit dashboard`: the report's page, live in a browser on this machine."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

DEFAULT_PORT = 8400


@app.command()
def dashboard(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    compare: str | None = typer.Option(
        None, "--compare", help="A second run to draw beside it.", metavar="TRIAL or EXPERIMENT/TRIAL"
    ),
    port: int = typer.Option(DEFAULT_PORT, "--port", help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = CLUSTER_OPTION,
    here: bool = HERE_OPTION,
) -> None:
    """Serve the runs as a live page to browsers on this machine, until Ctrl-C. It changes nothing.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which.
    """
    actions.dashboard.dashboard(experiment, trial, compare, port, fileroot, cluster, here)
