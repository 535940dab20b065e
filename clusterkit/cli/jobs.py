"""`clusterkit jobs`: what the cluster's Ray works on, and what it has worked on."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, USER_OPTION, new_app
from clusterkit.ssh.host_options import HostOptions

app = new_app()


@app.command()
@takes_hosts
def jobs(
    *,
    hosts: HostOptions,
    alive: bool = typer.Option(False, "--alive", help="Only those that wait or run."),
    as_json: bool = JSON_OPTION,
    user: str | None = USER_OPTION,
) -> None:
    """List your jobs on the cluster's Ray, the oldest first; those of others are counted, and listed with --user.

    Ray forgets them when its head is started anew; the runs themselves stay on the storage. It goes to the current
    cluster (clusterkit use); --cluster NAME names another.
    """
    actions.jobs.jobs(hosts, user, alive=alive, as_json=as_json)
