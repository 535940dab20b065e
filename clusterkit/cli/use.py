"""`clusterkit use`: the current cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def use(
    name: str | None = typer.Argument(None, metavar="NAME", help="The cluster; all are listed when left out."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Choose the cluster that commands go to when they name none, or list the clusters.

    The first set-up of a cluster chooses it, too. $CLUSTERKIT_CLUSTER chooses for one shell, --cluster NAME for one
    command; --here means this machine.
    """
    actions.use.use(name, as_json)
