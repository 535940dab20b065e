"""Where the ranks of a run go on a Ray cluster: whole hosts first, the head node and the storage's host last."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node  # there is no public one; verl takes it, too
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer.config import RunConfig
from trainer.errors import InterruptedRunError
from trainer.launch.ray_servers import GpusOfNode, supply
from trainer.placement import gpus_per_server
from trainer.train.tensorparallel import shard_ranks, tensor_degree

log = logging.getLogger("trainer")

POLL_SECONDS = 0.5
WAITING_SECONDS = 60.0
"""How often a run that waits for resources says so."""
PINNED_SECONDS = 20.0
"""How long bundles wait on the nodes that were chosen for them: free when they were looked at, taken since."""
FREED_SECONDS = 15.0
"""How long Ray may take to free the places of what has just ended: a supervised start, or the attempt before."""
LOOK_SECONDS = 20.0
"""How long a node has to say what file system it keeps the runs on."""
NETWORK_FILE_SYSTEMS = ("nfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse", "9p", "cifs", "smb", "wekafs")


@dataclass(frozen=True, slots=True)
class FreeNode:
    """A node of the cluster as placement sees it."""

    address: str  # its IP address; Ray has a resource `node:ADDRESS` for it
    gpus: int
    cpus: int
    spared: bool = False
    """It has other work, as head node or host of the storage, and is taken only where the others do not do."""


def bundle_size(config: RunConfig) -> int:
    """GPUs that must be on one host together: those of a tensor parallel group, of a replica that is no larger than a
    host, and of a server that shares them.
    """
    own = tensor_degree(config)
    replica = own * shard_ranks(config)
    if replica and config.n_gpus_per_node % replica == 0:
        own = replica
    size = own
    if config.allocation is not None and config.allocation.colocated:
        size = math.lcm(size, gpus_per_server(config) or 1)
    return size if config.ranks % size == 0 else own


def choose_nodes(nodes: Sequence[FreeNode], bundles: int, size: int) -> list[str]:
    """Choose a node for every bundle: as few nodes as will do, and none that is spared as long as others have room.

    Args:
        size: GPUs, and CPUs, of one bundle.

    Returns:
        Addresses, one for each bundle; empty where the free nodes have no room for all of them.
    """
    chosen: list[str] = []
    for node in sorted(nodes, key=lambda node: (node.spared, -node.gpus, node.address)):
        room = min(node.gpus, node.cpus) // size
        chosen += [node.address] * min(room, bundles - len(chosen))
    return chosen if len(chosen) == bundles else []


def rank_order(places: Sequence[GpusOfNode], first_node: str = "") -> list[int]:
    """Order actors by node and GPU, so that neighbouring ranks, such as those of a tensor parallel group, share a host.

    Args:
        first_node: id of the node that rank 0 has to be on; empty: any.

    Returns:
        Numbers of the actors by rank.
    """
    seen = {place.node: number for number, place in reversed(list(enumerate(places)))}

    def key(number: int) -> tuple[bool, int, tuple[tuple[int, str], ...], int]:
        place = places[number]
        gpus = tuple((int(gpu) if gpu.isdigit() else 0, gpu) for gpu in place.ids)
        return place.node != first_node, seen[place.node], gpus, number

    return sorted(range(len(places)), key=key)


def reserve(config: RunConfig, stop: Callable[[], bool]) -> tuple[Any, list[int]]:
    """Reserve places for all ranks. Waits until the cluster has room: a node may still come back.

    With GPUs, the ranks that must share a host share a bundle. Without, rank 0 stays on this node, which writes the
    same log, and the others are spread.

    Returns:
        The placement group, and the number of the bundle of each rank.

    Raises:
        InterruptedRunError: `stop` said so.
    """
    if not config.n_gpus_per_node:
        bundles: list[dict[str, float]] = [{"CPU": 1} for _ in range(config.ranks)]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = placement_group(bundles, strategy="SPREAD")
        _await(group, config.ranks, "CPU", stop)
        return group, list(range(config.ranks))
    size = bundle_size(config)
    bundle = {"CPU": float(size), "GPU": float(size)}
    count = config.ranks // size
    numbers = [rank // size for rank in range(config.ranks)]
    spared = spared_nodes(Path(config.fileroot))
    chosen = await_nodes(lambda: free_nodes(spared), count, size, stop)
    if chosen:
        group = placement_group([{**bundle, f"node:{address}": 0.001} for address in chosen], strategy="PACK")
        if group.wait(timeout_seconds=PINNED_SECONDS):
            return group, numbers
        remove_placement_group(group)
    group = placement_group([bundle] * count, strategy="PACK")
    _await(group, config.ranks, "GPU", stop)
    return group, numbers


def _await(group: Any, ranks: int, kind: str, stop: Callable[[], bool]) -> None:
    """Wait until Ray has resources for all ranks, and log what is missing."""
    told = time.monotonic()
    while not group.wait(timeout_seconds=POLL_SECONDS):
        if stop():
            raise InterruptedRunError("interrupted while waiting for places in Ray")
        if time.monotonic() - told > WAITING_SECONDS:
            told = time.monotonic()
            log.warning(f"waiting for places: {ranks} ranks want a {kind} each; {supply(kind)}")


def await_nodes(
    look: Callable[[], Sequence[FreeNode]],
    bundles: int,
    size: int,
    stop: Callable[[], bool],
    seconds: float = FREED_SECONDS,
) -> list[str]:
    """As `choose_nodes`, but what is not free yet may become so. look: returns the nodes as they are now."""
    give_up = time.monotonic() + seconds
    while not (chosen := choose_nodes(look(), bundles, size)) and time.monotonic() < give_up and not stop():
        time.sleep(POLL_SECONDS)
    return chosen


def spared_nodes(runs: Path) -> set[str]:
    """Ids of the nodes with other work. runs: folder of runs, on the shared storage."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    head = ray.get_runtime_context().get_node_id()  # the driver is there
    return {head, *storage_hosts(nodes, runs)}


def free_nodes(spared: Collection[str]) -> list[FreeNode]:
    """The living nodes of the cluster and what is free on them. spared: ids of those with other work."""
    free = available_resources_per_node()
    return [
        FreeNode(
            str(node["NodeManagerAddress"]),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
            int(free.get(node["NodeID"], {}).get("CPU", 0)),
            spared=node["NodeID"] in spared,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def storage_hosts(nodes: Sequence[str], runs: Path) -> set[str]:
    """Ids of the nodes that have a folder on a disk of their own, where others have it over the network."""
    look = ray.remote(num_cpus=0, max_retries=0)(over_network)
    asked = {
        node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(runs))
        for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=LOOK_SECONDS)
    answers: dict[str, bool] = {}
    for node, answer in asked.items():
        try:
            answers[node] = ray.get(answer, timeout=0)
        except RayError:  # it is busy or lost: nothing is known of it
            ray.cancel(answer)
    return {node for node, network in answers.items() if not network} if any(answers.values()) else set()


def over_network(folder: str, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether a folder of this machine is on a network file system. mounts: the system's table."""
    path, best, kind = Path(folder).resolve(), Path(), ""
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, found, *_ = line.split(" ")
        place = Path(point.replace("\\040", " "))
        if path.is_relative_to(place) and len(place.parts) >= len(best.parts):
            best, kind = place, found
    return kind.startswith(NETWORK_FILE_SYSTEMS)
