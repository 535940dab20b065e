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
"""
)
def use(
    name: str | None = typer.Argument(None, metavar="NAME", help="The cluster; all are listed when left out."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Choose the cluster that commands go to when they name none, or list the clusters.

    The first set-up of a cluster chooses it, too. $CLUSTERKIT_CLUSTER chooses for one shell, --cluster NAME for one
    command; --here means this machine.
    """
    actions.use.use(name, as_json)
