"""What a run needs of a cluster: numbers that checks compare the facts with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterkit.provision.images.versions import versions

GIB = 1024**3


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
