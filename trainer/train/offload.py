"""Weights and optimizer state between the GPU and host memory, for GPUs that generate while nobody trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainer.machine import memory_info
from trainer.train.distributed import local_part, with_local_part


class HostRoom:
    """Moves a learner's tensors to host memory and back, bit for bit.

    Memory for them is pinned where the host has enough, and kept for the next time: 18.5 GB took 12 s into fresh
    pageable memory, and a checkpoint's copy of as much 0.4 s into pinned memory that was there before (NVIDIA H200,
    benchmarks/training.py --keeping).
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)
        self._away: set[str] = set()

    def put_weights(self, policy: nn.Module) -> None:
        """Move weights, whole or sharded, to host memory; nothing happens where they are there already."""
        if "weights" not in self._away:
            self._away.add("weights")
            policy._apply(_once(self._put))  # what Module.to() does, with room of our own
            _settle(free=True)

    def fetch_weights(self, policy: nn.Module, device: torch.device) -> None:
        """Move weights that were put away to the device."""
        if "weights" in self._away:
            self._away.remove("weights")
            left: list[Tensor] = []
            policy._apply(_once(lambda tensor: self._fetch(tensor, device, left)))
            self._take_back(left)

    def put_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state to host memory; nothing happens where it is there already. Counters stay where
        they are: the optimizer knows where it wants them.
        """
        if "state" not in self._away:
            self._away.add("state")
            for state in optimizer.state.values():
                state.update({name: self._put(value) for name, value in state.items() if _is_sized(value)})
            _settle(free=True)

    def fetch_state(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        """Move state that was put away to the device."""
        if "state" in self._away:
            self._away.remove("state")
            left: list[Tensor] = []
            for state in optimizer.state.values():
                state.update(
                    {name: self._fetch(value, device, left) for name, value in state.items() if _is_sized(value)}
                )
            self._take_back(left)

    @torch.no_grad()
    def _put(self, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        free = self._free[local.shape, local.stride(), local.dtype]
        room = free.pop() if free else host_room(local, gpu=local.is_cuda)
        return with_local_part(tensor, room.copy_(local, non_blocking=True))

    @torch.no_grad()
    def _fetch(self, tensor: Tensor, device: torch.device, left: list[Tensor]) -> Tensor:
        local = local_part(tensor)
        left.append(local)
        target = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=device)
        return with_local_part(tensor, target.copy_(local, non_blocking=True))

    def _take_back(self, left: list[Tensor]) -> None:
        """Keep the room that was left, for the next time, when nothing is copied from it any more."""
        _settle()
        for room in left:
            if room.is_pinned():  # pageable memory is given back: the host may have little
                self._free[room.shape, room.stride(), room.dtype].append(room)


def _once(move: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """For each tensor once: tied weights are met twice."""
    seen: dict[int, Tensor] = {}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) in seen:
            return tensor
        seen[id(tensor)] = tensor
        return move(tensor)

    return moved


def _is_sized(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _settle(*, free: bool = False) -> None:
    """Wait for the copies; where asked, leave what they were made from to others."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if free:
            torch.cuda.empty_cache()


LEAST_FREE = 0.25
"""Share of a host's memory that pinned memory leaves to others: what is pinned can be neither swapped nor moved."""


def host_room(like: Tensor, *, gpu: bool) -> Tensor:
    """Uninitialised host memory of a tensor's shape, strides and dtype. gpu: whether a GPU is to use it. Pageable where
    the host would have too little left; of single numbers, too: memory is pinned by pages.
    """
    pinned = gpu and like.numel() > 1 and _may_pin(like.numel() * like.element_size())
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu", pin_memory=pinned)


def _may_pin(nbytes: int) -> bool:
    """Whether the host keeps enough other memory; PyTorch pins the next power of two. False where it does not say."""
    pinned, memory = 1 << (nbytes - 1).bit_length(), memory_info()
    return bool(memory) and memory.get("MemAvailable", 0) - pinned >= LEAST_FREE * memory["MemTotal"]
