"""`clusterkit down`: take the cluster's containers and files off its hosts, after showing them."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import new_app
from clusterkit.ssh.host_options import HostOptions

app = new_app("Remove what carries the cluster's label, and nothing else.")


@app.command(
    examples="""
clusterkit down
clusterkit down --cluster lab -y --json
clusterkit down --cluster lab --forget
"""
)
@takes_hosts
def down(
    *,
    hosts: HostOptions,
    yes: bool = typer.Option(False, "-y", "--yes", help="Do not ask."),
    user: list[str] | None = typer.Option(  # noqa: B008
        None, "--user", metavar="NAME", help="Also although runs of that user are alive; once for each of them."
    ),
    forget: bool = typer.Option(
        False, "--forget", help="Touch no host, only forget the cluster on this machine: its hosts are gone for good."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON; needs -y."),
) -> None:
    """Remove what carries the cluster's label, and nothing else.

    Shows the containers and files first, and asks. Docker, images, shared storage and everything of others stay. Exit
    code: 0 nothing of the cluster is left, 1 no host could be reached or the user said no, 2 bad usage, 3 some hosts
    could not be reached or kept something. It goes to the current cluster (clusterkit use); with -y and several
    clusters it has to be named. Where jobs of other users are alive it is refused, unless --user names them.
    --forget is for hosts that never come back: it says what may still run there.
    """
    if forget:
        actions.forget.forget(hosts, yes=yes, users=user or [], as_json=as_json)
        return
    actions.down.down(hosts, yes=yes, users=user or [], as_json=as_json)
