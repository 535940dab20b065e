"""What a preset needs of a cluster, by its values."""

from __future__ import annotations

from clusterkit.capacity.preset_plan import storage_of
from clusterkit.config.resolve import resolve
from clusterkit.provision.checks.needs import GIB, Needs

_LEAST_DATA_SPACE = 5 * GIB


_CHECKPOINTS = 20
"""A run may keep hundreds; hosts are asked for room for the first of them, `presets plan` tells the whole."""


def needs_of_preset(name: str) -> Needs:
    """What a preset needs with its default task, by its values: `7B_n4` four hosts of eight GPUs, `tiny` one without.

    Raises:
        UserError: no preset has that name.

    """
    resolved = resolve(name)
    config = resolved.config
    return Needs(
        hosts=config.n_nodes,
        gpus_per_host=config.n_gpus_per_node,
        data_space=max(_LEAST_DATA_SPACE, storage_of(config, resolved.task, _CHECKPOINTS)),
        preset=name,
    )
