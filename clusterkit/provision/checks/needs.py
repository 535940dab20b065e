"""What a run needs of a cluster: numbers that checks compare the facts with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterkit.provision.images.versions import versions

GIB = 1024**3

_LEAST_DATA_SPACE = 5 * GIB
_CHECKPOINTS = 20
"""A run may keep hundreds; hosts are asked for room for the first of them, `presets plan` tells the whole."""


def image_cuda() -> int:
    """Major version of CUDA that the runtime image is built with, by the tag of its base in images/versions.env."""
    base = versions()["CUDA_BASE"]
    tag = re.search(r":(\d+)\.", base)
    if tag is None:
        raise ValueError(f"images/versions.env: CUDA_BASE={base} names no version of CUDA")
    return int(tag[1])


@dataclass(frozen=True, slots=True)
class Needs:
    """hosts and gpus_per_host: the least. Sizes in bytes: free space where images go, and where data goes.

    cuda: major version that the runtime image is built with (`image_cuda`), which decides the oldest driver.
    """

    hosts: int = 1
    gpus_per_host: int = 0
    image_space: int = 5 * GIB
    gpu_image_space: int = 40 * GIB
    data_space: int = 5 * GIB
    cuda: int = field(default_factory=image_cuda)
    preset: str = ""


def needs_of_preset(name: str) -> Needs:
    """What a preset needs with its default task, by its values: `7B_n4` four hosts of eight GPUs, `tiny` one without.

    Raises:
        UserError: no preset has that name.

    """
    from clusterkit.capacity.preset_plan import storage_of  # noqa: PLC0415 (only with a preset)
    from clusterkit.config.resolve import resolve  # noqa: PLC0415

    resolved = resolve(name)
    config = resolved.config
    return Needs(
        hosts=config.n_nodes,
        gpus_per_host=config.n_gpus_per_node,
        data_space=max(_LEAST_DATA_SPACE, storage_of(config, resolved.task, _CHECKPOINTS)),
        preset=name,
    )
