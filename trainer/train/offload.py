"""Weights and optimizer state between the GPU and host memory, for GPUs that generate while nobody trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def move(policy: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all of it to `device`, whole or sharded; gives the GPU's memory back where it is left. Nothing happens where
    it is there already.
    """
    if next(policy.parameters()).device.type == device.type:
        return
    policy.to(device)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, non_blocking=device.type == "cuda")
    if device.type == "cpu":
        torch.cuda.empty_cache()


def bytes_on(device_type: str, policy: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights and optimizer state of this rank that lie on devices of that type."""
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [t.to_local() if hasattr(t, "to_local") else t for t in [*policy.parameters(), *states]]
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.device.type == device_type)
