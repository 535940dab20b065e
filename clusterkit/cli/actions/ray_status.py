"""`clusterkit ray-status`: ask the hosts and Ray, and print what is there."""

from __future__ import annotations

import asyncio

import typer

from clusterkit.cli.actions.target import hosts_of_cluster
from clusterkit.provision.ray.hosts import connected
from clusterkit.provision.ray.state import ClusterState, observe
from clusterkit.provision.ray.view import lines_of
from clusterkit.ssh.connection import connect
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output


def ray_status(hosts: HostOptions, as_json: bool) -> None:
    """Print the cluster's nodes; the exit code says whether all are there."""
    state = asyncio.run(_observe(select(hosts_of_cluster(hosts))))
    output.outcome("\n".join(lines_of(state)), state.as_dict(), as_json=as_json)
    if not state.ready:
        raise typer.Exit(1)


async def _observe(selection: Selection) -> ClusterState:
    cluster = selection.cluster
    expected = dict.fromkeys(host.name for host in selection.hosts)
    # Ray is asked on the head, whatever --limit says.
    hosts_asked = [host for host in cluster.hosts if host.name in expected or host is cluster.head_host]
    async with connected(hosts_asked, lambda host: connect(host, selection.ssh)) as hosts:
        return await observe(hosts.sessions, cluster, expected=expected, unreachable=hosts.unreachable)
