"""What training moves between hosts, and where whole replicas on fewer of them (HSDP) would move less."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from clusterkit.capacity.memory import (
    FLOAT32,
    GIB,
    RELEASED,
    ROOM,
    Usage,
    trained_parameters,
    training_usage,
    weight_bytes,
)
from clusterkit.capacity.shapes import ModelShape
from clusterkit.common.finding import Finding, Level
from trainer.allocation import Allocation, Dialect, Layout, Part
from trainer.config import RunConfig


def between_hosts(config: RunConfig, shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Return the bytes that every host gets from others: for a micro-batch of its ranks, and for an optimizer step.

    A replica over several hosts brings the layers of the others to each of them for both passes over a micro-batch, and
    shares its gradients out once. Replicas add their gradients up (a ring: twice what a host holds of them). What a
    host gets comes through the network adapters of all its GPUs, and from GPU to GPU within it.

    Not counted: gradients that are too large to be kept whole are shared out within a replica every micro-batch.
    """
    learned, each, once = trained_parameters(config, shape), 0.0, 0.0
    hosts, replicas = _hosts(config, layout), layout.gpus // layout.sharded_over
    if hosts > 1:
        each = 2 * weight_bytes(config) * shape.parameters * (1 - 1 / hosts)
        once = FLOAT32 * learned * (1 - 1 / hosts)
    if layout.gpus > config.n_gpus_per_node:
        held = min(1.0, config.n_gpus_per_node / layout.sharded_over)
        once += 2 * FLOAT32 * learned * held * (1 - 1 / replicas)
    return each, once


def check_shards(config: RunConfig, shape: ModelShape | None, gpu_memory: int) -> list[Finding]:
    """Report what goes between hosts for the training, and propose replicas where fewer hosts have room for one."""
    allocation = config.allocation
    if allocation is None or allocation.training is None or shape is None or config.n_nodes == 1:
        return []
    layout = allocation.training.layout
    hosts = _hosts(config, layout)
    if layout.gpus <= config.n_gpus_per_node:
        return []
    message = f"{_replicas(layout)} over {_count(hosts, 'host')}{' each' * (layout.shard > 0)}: "
    message += _moved(config, shape, layout)
    if hosts == 1 or allocation.training.experts is not None:
        return [Finding("", "shards", Level.OK, message)]
    for smaller in _smaller(config, layout):
        usage = training_usage(config, shape, smaller)
        needed = usage.total + (RELEASED if allocation.colocated else 0)
        if needed <= (1 - ROOM) * gpu_memory:
            message += (
                f". {_replicas(smaller)} over {_count(_hosts(config, smaller), 'host')} each take {needed / GIB:.1f} "
                f"GiB of a GPU (weights and optimizer {_kept(usage) / GIB:.1f}): {_moved(config, shape, smaller)}"
            )
            return [Finding("", "shards", Level.WARN, message, f"allocation_mode={_written(allocation, smaller)!r}")]
    return [Finding("", "shards", Level.OK, f"{message}; fewer hosts have no room for a replica")]


def _smaller(config: RunConfig, layout: Layout) -> Iterator[Layout]:
    """Yield the layout in replicas over one host, two, four and so on, each as large as such hosts have room for.

    A replica is over whole hosts, or a host has a whole number of them: placement would tear others.
    """
    data = layout.data * layout.pipeline
    own, host = layout.tensor * layout.context, config.n_gpus_per_node
    fitting = [s for s in range(1, data) if data % s == 0 and (host % (s * own) == 0 or s * own % host == 0)]
    hosts, most = 1, _hosts(config, layout)
    while hosts < most:
        shard = max((s for s in fitting if s * own <= hosts * host), default=0)
        if shard:
            yield replace(layout, data=data, pipeline=1, expert=1, shard=shard)
        hosts *= 2


def _hosts(config: RunConfig, layout: Layout) -> int:
    """Return the most hosts that a replica is over, where they are filled one after the other."""
    host, replica = config.n_gpus_per_node, layout.sharded_over
    taken = host - math.gcd(host, replica)  # of the first one, by the replica before
    return min(-(-(taken + replica) // host), -(-layout.gpus // host))


def _moved(config: RunConfig, shape: ModelShape, layout: Layout) -> str:
    each, once = between_hosts(config, shape, layout)
    layers = f"{each / GIB:.1f} GiB of layers for a micro-batch and " if each else ""
    return f"every host gets {layers}{once / GIB:.1f} GiB of gradients for an optimizer step from others"


def _replicas(layout: Layout) -> str:
    if layout.sharded_over == layout.gpus:
        return "one replica"
    return f"{layout.gpus // layout.sharded_over} replicas of {layout.sharded_over} GPUs"


def _kept(usage: Usage) -> int:
    return usage.parts["state"] + usage.parts["base"]


def _written(allocation: Allocation, layout: Layout) -> str:
    """Return allocation_mode with another layout for the training, in a form that knows replicas."""

    def other(part: Part) -> Part:
        return part if part is not allocation.training else replace(part, backend="fsdp", layout=layout)

    changed = replace(allocation, groups=tuple(tuple(other(part) for part in group) for group in allocation.groups))
    engines = allocation.dialect is Dialect.ENGINES
    return changed.convert(Dialect.ENGINES if engines else Dialect.COLON)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
