"""The ranks of one trainer. One rank needs no process group: every collective is then the identity."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer.errors import UserError

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    messages: dist.ProcessGroup | None = None
    """Group for Python objects, where the ranks' own group moves tensors on GPUs only; None: the ranks' own."""

    @property
    def is_main(self) -> bool:
        """Rank 0 writes logs, metrics and exports."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, the same on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.messages)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.messages)
        return values[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def single_world(gpu: int = 0) -> World:
    """One rank on a GPU, by its number, or on the CPU. Raises UserError when there is no GPU of that number."""
    if not torch.cuda.is_available():
        return World(0, 1, torch.device("cpu"))
    if gpu >= torch.cuda.device_count():
        raise UserError(
            f"training is to run on GPU {gpu}, counted from 0, and {torch.cuda.device_count()} are visible here: lower "
            "what allocation_mode asks for, or check CUDA_VISIBLE_DEVICES and nvidia-smi"
        )
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return World(0, 1, device)


def join_world(rank: int, size: int, rendezvous: str, gpu: int | None = None) -> World:
    """Meet the other ranks; gloo on CPU, NCCL where every rank has a GPU.

    Args:
        rank: this one's number. size: how many there are. rendezvous: `file://PATH` among the ranks of one machine,
            `tcp://HOST:PORT` between machines. gpu: number of this rank's GPU among those that it sees; None: its rank.

    Raises:
        RuntimeError: not all ranks came within ten minutes.

    """
    local = rendezvous.startswith("file://")
    device_index = rank if gpu is None else gpu
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= (size if gpu is None else gpu + 1)
    if not on_gpu and local:
        # Ranks of one machine: nothing has to listen on an outward interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=RENDEZVOUS_TIMEOUT,
    )
    device = torch.device("cuda", device_index) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    messages = dist.new_group(backend="gloo", timeout=RENDEZVOUS_TIMEOUT) if on_gpu else None
    return World(rank, size, device, init_device_mesh(device.type, (size,)), messages)


def leave_world(world: World) -> None:
    """Close the process group, where there is one."""
    if world.size > 1:
        dist.destroy_process_group()


def shard(policy: nn.Module, world: World) -> None:
    """FSDP2 in place: every decoder layer is a unit, the rest (embedding, final norm, head) is the root's."""
    if world.mesh is None:
        return
    for layer in policy.lm.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=world.mesh)
    fully_shard(policy, mesh=world.mesh)
