"""`clusterkit ray-status`: the cluster's Ray nodes, GPUs and versions, and what is missing."""

from __future__ import annotations

from clusterkit.cli import actions
from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.ssh.host_options import HostOptions

app = new_app("Show the cluster's Ray nodes, GPUs and versions.")


@app.command(
    examples="""
clusterkit ray-status
clusterkit ray-status --cluster lab --json
"""
)
@takes_hosts
def ray_status(*, hosts: HostOptions, as_json: bool = JSON_OPTION) -> None:
    """Show the cluster's Ray nodes, GPUs and versions.

    Asks the hosts and Ray itself, of the current cluster (clusterkit use) or of --cluster NAME. Exit code: 0 every
    expected node and GPU is there, 1 something is missing, 2 bad usage.
    """
    actions.ray_status.ray_status(hosts, as_json)
