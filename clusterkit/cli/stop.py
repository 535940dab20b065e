"""`clusterkit stop`: end a training that goes on later, here or on a cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.ssh.host_options import HostOptions

app = new_app()


@app.command(
    examples="""
clusterkit stop
clusterkit stop tiny-recall/run2 --deadline 60
clusterkit stop --cluster lab --force --json
"""
)
@takes_hosts
@takes_run("name", "experiment", "trial", "fileroot", "here", "user")
def stop(
    *,
    hosts: HostOptions,
    run: RunOptions,
    deadline: float = typer.Option(
        600.0, "--deadline", min=1.0, metavar="SECONDS", help="Seconds until it is ended by force."
    ),
    force: bool = typer.Option(False, "--force", help="End it at once; what came after the last checkpoint is lost."),
    as_json: bool = JSON_OPTION,
) -> None:
    """End a training: it writes a recover checkpoint first, and the same train command goes on from there.

    Without a name it goes to the run that is alive, on this machine or on the current cluster; where one is on each,
    --here and --cluster NAME say which. Only your own runs, unless --user names somebody else.
    """
    actions.stop.stop(run, hosts, deadline=deadline, force=force, as_json=as_json)
