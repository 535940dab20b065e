"""`clusterkit ray-status`: the cluster's Ray nodes, GPUs and versions, and what is missing."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.ssh.host_options import HostOptions

app = typer.Typer(
    help="Show the cluster's Ray nodes, GPUs and versions.",
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@takes_hosts
def ray_status(*, hosts: HostOptions, as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show the cluster's Ray nodes, GPUs and versions.

    Asks the hosts and Ray itself, of the current cluster (clusterkit use) or of --cluster NAME. Exit code: 0 every
    expected node and GPU is there, 1 something is missing, 2 bad usage.
    """
    actions.ray_status.ray_status(hosts, as_json)
