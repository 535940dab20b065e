"""`clusterkit logs`: what a run has logged, here or on a cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.ssh.host_options import HostOptions

app = new_app()


@app.command(
    examples="""
clusterkit logs -f
clusterkit logs tiny-recall/run2 --console -n 50
clusterkit logs --engine 0 --cluster lab
"""
)
@takes_hosts
@takes_run("name", "experiment", "trial", "fileroot", "here", "user")
def logs(
    *,
    hosts: HostOptions,
    run: RunOptions,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on showing what is added, until Ctrl-C."),
    lines: int = typer.Option(200, "--lines", "-n", min=0, help="Begin with so many lines of its end; 0: with all."),
    console: bool = typer.Option(False, "--console", help="What the newest attempt printed, instead of main.log."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="What that rank of the newest attempt printed."),
    engine: str | None = typer.Option(
        None,
        "--engine",
        metavar="SERVER",
        help="What that engine server printed: its name or number (clusterkit serve list).",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON object a line: log, time, level, text."),
) -> None:
    """Print a run's log: main.log, or what an attempt, one of its ranks or an engine server printed.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Only your own runs, unless --user names somebody else.
    """
    actions.logs.show(run, hosts, (console, rank, engine), lines=lines, follow=follow, as_json=as_json)
