"""`clusterkit use`: the current cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app

app = new_app()


@app.command(
    examples="""
clusterkit use
clusterkit use lab
clusterkit use --here
"""
)
def use(
    name: str | None = typer.Argument(None, metavar="NAME", help="The cluster; all are listed when left out."),
    here: bool = typer.Option(False, "--here", help="No cluster: commands go to this machine."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Choose the cluster that commands go to when they name none, or this machine; or list the clusters.

    The first set-up of a cluster chooses it, too. $CLUSTERKIT_CLUSTER chooses for one shell, --cluster NAME and --here
    for one command.
    """
    actions.use.use(name, here=here, as_json=as_json)
