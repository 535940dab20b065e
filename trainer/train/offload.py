"""Weights and optimizer state between the GPU and host memory, for GPUs that generate while nobody trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def move_weights(policy: nn.Module, device: torch.device) -> None:
    """Move weights, whole or sharded, to `device`; nothing happens where they are there already."""
    if next(policy.parameters()).device.type != device.type:
        policy.to(device)
        _give_memory_back(device)


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state to `device`; nothing happens where it is there already. Counters stay where they are:
    the optimizer knows where it wants them.
    """
    moved = False
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim and value.device.type != device.type:
                state[name] = value.to(device)
                moved = True
    if moved:
        _give_memory_back(device)


def _give_memory_back(device: torch.device) -> None:
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()
