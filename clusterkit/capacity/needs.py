"""What a preset needs of a cluster."""

from __future__ import annotations

from clusterkit.capacity.preset_plan import storage_of
from clusterkit.config.resolve import resolve
from clusterkit.provision.checks.needs import GIB, Needs

_LEAST_DATA_SPACE = 5 * GIB
_CHECKPOINTS = 20
"""Hosts must have room for the first checkpoints; a run may keep hundreds, which `presets plan` counts."""


def needs_of_preset(name: str) -> Needs:
    """Return what a preset needs with its default task, such as four hosts of eight GPUs for 7B_n4."""
    resolved = resolve(name)
    config = resolved.config
    return Needs(
        hosts=config.n_nodes,
        gpus_per_host=config.n_gpus_per_node,
        data_space=max(_LEAST_DATA_SPACE, storage_of(config, resolved.task, _CHECKPOINTS)),
        preset=name,
    )
