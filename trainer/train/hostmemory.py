"""Host memory for a GPU's tensors: pinned, which a GPU fills and reads several times as fast, where there is enough."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

LEAST_FREE = 0.25
"""Share of a host's memory that pinned memory leaves to others: what is pinned can be neither swapped nor moved."""


def host_room(like: Tensor, *, gpu: bool) -> Tensor:
    """Uninitialised host memory of a tensor's shape, strides and dtype. gpu: whether a GPU is to use it. Pageable where
    the host would have too little left; of single numbers, too: memory is pinned by pages.
    """
    pinned = gpu and like.numel() > 1 and _may_pin(like.numel() * like.element_size())
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu", pin_memory=pinned)


def _may_pin(nbytes: int) -> bool:
    """Whether the host keeps enough other memory. False where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib.get("MemAvailable", 0) * 1024 - nbytes >= LEAST_FREE * kib["MemTotal"] * 1024
