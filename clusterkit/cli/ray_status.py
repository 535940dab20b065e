"""`clusterkit ray-status`: the cluster's Ray nodes, GPUs and versions, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.target import hosts_of_cluster
from clusterkit.provision.ray.view import lines_of
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.provision.ray.state import ClusterState

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
    import asyncio  # noqa: PLC0415

    state = asyncio.run(_observe(select(hosts_of_cluster(hosts))))
    if as_json:
        output.result_json(state.as_dict())
    else:
        output.result("\n".join(lines_of(state)))
    if not state.ready:
        raise typer.Exit(1)


async def _observe(selection: Selection) -> ClusterState:
    from clusterkit.provision.ray.hosts import connected  # noqa: PLC0415
    from clusterkit.provision.ray.state import observe  # noqa: PLC0415
    from clusterkit.ssh.connection import connect  # noqa: PLC0415

    cluster = selection.cluster
    expected = dict.fromkeys(host.name for host in selection.hosts)
    # Ray is asked on the head, whatever --limit says.
    asked = [host for host in cluster.hosts if host.name in expected or host is cluster.head_host]
    async with connected(asked, lambda host: connect(host, selection.ssh)) as hosts:
        return await observe(hosts.sessions, cluster, expected=expected, unreachable=hosts.silent)
