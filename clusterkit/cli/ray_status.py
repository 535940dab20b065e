"""`clusterkit ray-status`: the cluster's Ray nodes, GPUs and versions, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from clusterkit.cli.hostoptions import HostOptions, Selection, select, takes_hosts
from clusterkit.cli.target import hosts_of_cluster
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.provision.ray.state import ClusterState, NodeState

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


def lines_of(state: ClusterState) -> list[str]:
    """Table, what Ray works on, and every problem with its container's last lines."""
    rows = [["node", "role", "address", "container", "ray", "GPUs", "CPUs", "memory", "Ray", "Python", "image"]]
    rows += [_row(node) for node in state.nodes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    alive = [node for node in state.nodes if node.ray_state == "ALIVE"]
    wanted = sum(node.role != "other" for node in state.nodes)
    gpus, gpus_wanted = sum(node.gpus for node in alive), sum(node.gpus_expected for node in state.nodes)
    lines += [
        "",
        f"cluster {state.cluster}: {len(alive)} of {wanted} nodes and {gpus} of {gpus_wanted} GPUs alive in Ray",
    ]
    if state.jobs:
        lines.append(f"running: {', '.join(state.jobs)}")
    if state.wrong:
        lines += ["", *(f"problem: {text}" for text in state.wrong)]
    for node in state.nodes:
        if node.problem and node.log:
            lines += ["", f"last lines of {node.name}'s container:", *(f"    {line}" for line in node.log)]
    return lines


def _row(node: NodeState) -> list[str]:
    gpus = f"{node.gpus}/{node.gpus_expected}" if node.gpus_expected else str(node.gpus)
    return [
        node.name,
        node.role,
        node.address or "-",
        node.container,
        node.ray_state.lower() or "-",
        gpus,
        str(node.cpus),
        f"{node.memory / 2**30:.0f} GiB" if node.memory else "-",
        node.ray or "-",
        node.python or "-",
        node.image_id.removeprefix("sha256:")[:12] or "-",
    ]
