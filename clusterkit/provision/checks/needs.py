"""What a run needs of a cluster, for checks to compare with the facts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterkit.provision.images.versions import versions

GIB = 1024**3


def image_cuda() -> int:
    """Return the major version of CUDA in the runtime image: that of its base's tag in images/versions.env."""
    base = versions()["CUDA_BASE"]
    tag = re.search(r":(\d+)\.", base)
    if tag is None:
        raise ValueError(f"images/versions.env: CUDA_BASE={base} names no version of CUDA")
    return int(tag[1])


@dataclass(frozen=True, slots=True)
class Needs:
    """The least that a run needs; sizes in bytes."""

    hosts: int = 1
    gpus_per_host: int = 0
    image_space: int = 5 * GIB  # free where images go
    gpu_image_space: int = 40 * GIB  # likewise, on hosts with GPUs
    data_space: int = 5 * GIB  # free where data goes
    cuda: int = field(default_factory=image_cuda)  # major version in the runtime image; decides the oldest driver
    preset: str = ""
