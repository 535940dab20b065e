"""What a run needs of a cluster: numbers that checks compare the facts with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterkit.images.versions import versions

GIB = 1024**3

_SIZE_OF_NAME = re.compile(r"^(?P<size>[\d.]+)(?P<unit>[BM])_n(?P<hosts>\d+)$")
_GPUS_PER_HOST = 8
_BYTES_PER_PARAMETER = 40
"""On storage: two recover slots of weights and optimizer (14 bytes each), and six exported models of 2 bytes."""


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
    """What a preset needs, by its name: `7B_n4` is four hosts of eight GPUs; `tiny` and `135M_cpu` one host without.

    Raises:
        UserError: no preset has that name (unless it is one of the size_nHOSTS kind).

    """
    named = _SIZE_OF_NAME.search(name)
    if named is None:
        from clusterkit.presets import load_size  # noqa: PLC0415

        load_size(name)
        return Needs(preset=name)
    hosts = int(named["hosts"])
    parameters = float(named["size"]) * (1e9 if named["unit"] == "B" else 1e6)
    space = max(5 * GIB, int(parameters * _BYTES_PER_PARAMETER))
    return Needs(hosts=hosts, gpus_per_host=_GPUS_PER_HOST, data_space=space, preset=name)
