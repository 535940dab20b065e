"""`clusterkit alerts`: send failures, stalls and the end of a run to a webhook or a command."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()


@app.command(
    examples="""
clusterkit alerts --webhook env:SLACK_URL
clusterkit alerts --command ./page-me.sh --every 300
clusterkit alerts --once --webhook file:hook --json
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here")
def alerts(
    *,
    run: RunOptions,
    webhook: str | None = typer.Option(
        None,
        "--webhook",
        metavar="SOURCE",
        help="Where the webhook's address is: file:PATH or env:NAME [env:CLUSTERKIT_WEBHOOK].",
    ),
    command: str | None = typer.Option(
        None, "--command", metavar="COMMAND", help="Run this instead, with the JSON on its input."
    ),
    every: float = typer.Option(60.0, "--every", min=0.1, metavar="SECONDS", help="Seconds between two looks."),
    once: bool = typer.Option(False, "--once", help="Look once; for cron."),
    as_json: bool = typer.Option(False, "--json", help="Print every alert that was delivered as a line of JSON."),
) -> None:
    """Watch a run; send a failure, a stall, a stop and the end, each once, as JSON.

    Goes on until the run is complete or Ctrl-C. What was delivered is noted beside the run (for one of a cluster, in
    the configuration folder of this machine): a second watcher does not repeat it. Without a name it goes to the
    run that was started last, on this machine or on the current cluster; --here and --cluster NAME say which.
    """
    actions.alerts.alerts(run, webhook, command, every=every, once=once, as_json=as_json)
