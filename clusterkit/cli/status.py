"""`clusterkit status`: how a run on this machine is doing, or any run whose log is at hand."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()


@app.command(
    examples="""
clusterkit status
clusterkit status tiny-recall/run2 --watch
clusterkit status --log main.log --json
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here", "user")
def status(
    *,
    run: RunOptions,
    as_json: bool = typer.Option(False, "--json", help="Print JSON (with --watch: one line per observation)."),
    watch: bool = typer.Option(False, "--watch", help="Go on showing it until the run ends or Ctrl-C."),
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Read this log instead: AReaL's of any version, or ours; - for stdin."
    ),
) -> None:
    """Show how a run is doing: step, reward trend, ETA, checkpoints, and whether it is alive.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Exit codes for scripts: 0 all is well, 1 the run failed, was killed or stands still (or
    there is none); on a cluster also 3, something could not be seen or is missing.
    """
    if log is not None:
        actions.status.show_log(log, run, as_json=as_json, watch=watch)
    else:
        actions.status.show(run, as_json=as_json, watch=watch)
