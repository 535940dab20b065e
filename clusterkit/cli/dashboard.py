"""`clusterkit dashboard`: the report's page, live in a browser on this machine."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import COMPARE_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()

DEFAULT_PORT = 8400


@app.command(
    examples="""
clusterkit dashboard
clusterkit dashboard tiny-recall/run2 --compare run1
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here")
def dashboard(
    *,
    run: RunOptions,
    compare: list[str] | None = COMPARE_OPTION,
    port: int = typer.Option(
        DEFAULT_PORT, "--port", metavar="PORT", min=0, max=65535, help="Port on 127.0.0.1; 0: a free one."
    ),
) -> None:
    """Serve the runs as a live page to browsers on this machine, until Ctrl-C. It changes nothing.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which.
    """
    actions.dashboard.dashboard(run, compare or [], port)
