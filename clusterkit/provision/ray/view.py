"""A cluster's nodes as text for people."""

from __future__ import annotations

from clusterkit.common.text_plot import columns
from clusterkit.provision.ray.state import ClusterState, NodeState


def lines_of(state: ClusterState) -> list[str]:
    """Return the table, what Ray works on, and every problem with its container's last lines."""
    rows = [["node", "role", "address", "container", "ray", "GPUs", "CPUs", "memory", "Ray", "Python", "image"]]
    rows += [_row(node) for node in state.nodes]
    lines = columns(rows)
    alive = [node for node in state.nodes if node.ray_state == "ALIVE"]
    expected = sum(node.role != "other" for node in state.nodes)
    gpus, gpus_wanted = sum(node.gpus for node in alive), sum(node.gpus_expected for node in state.nodes)
    lines += [
        "",
        f"cluster {state.cluster}: {len(alive)} of {expected} nodes and {gpus} of {gpus_wanted} GPUs alive in Ray",
    ]
    if state.jobs:
        lines.append(f"running: {', '.join(state.jobs)}")
    if state.all_problems:
        lines += ["", *(f"problem: {text}" for text in state.all_problems)]
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
