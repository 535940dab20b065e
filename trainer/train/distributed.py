"""The ranks of one trainer. One rank that computes in float32 needs no process group: every collective is then the
identity, and the weights are ordinary tensors.

Ranks form a mesh of data x tensor: the ranks of one row of it hold parts of the same layers (tensor parallel) and work
on the same rows; FSDP2 shards what they hold over the other dimension. With replicas (HSDP) it is replica x data x
tensor: FSDP2 shards within a replica, and adds gradients up over all. Neighbouring ranks share a replica. With bfloat16
the sharded weights, the sums of gradients and the optimizer's state are float32 ("master weights"), and the weights
that a layer computes with are made from them when it runs; that holds for one rank, too, which is then a mesh of one.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.errors import UserError
from trainer.machine import origin
from trainer.train.rendezvous import meet

RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
REPLICA, DATA, TENSOR = "replica", "data", "tensor"
# Whole gradients are kept over the micro-batches of a step while they take at most this share of a GPU.
WHOLE_GRADIENTS = 0.25


@dataclass(frozen=True, slots=True)
class World:
    """This process among the trainer's ranks.

    mesh: data x tensor, or replica x data x tensor; None for one rank whose weights are ordinary tensors. dtype: of
        forward and backward passes.
    messages: group for Python objects, where the ranks' own group moves tensors on GPUs only; None: the ranks' own.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    dtype: torch.dtype = torch.float32
    messages: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Rank 0 writes logs, metrics and exports."""
        return self.rank == 0

    @property
    def tensor_size(self) -> int:
        """Ranks that share a layer."""
        return 1 if self.mesh is None else self.mesh[TENSOR].size()

    @property
    def data_size(self) -> int:
        """Parts that the rows of a step are shared out to."""
        return self.size // self.tensor_size

    @property
    def place(self) -> str:
        """Where this rank is, for messages that another one prints: " (rank 3 on gpu07)". Empty for a single rank."""
        return f" (rank {self.rank} on {os.uname().nodename})" if self.size > 1 else ""

    @property
    def replicas(self) -> int:
        """Copies of the model, each sharded over ranks of its own."""
        return 1 if self.mesh is None or REPLICA not in _names(self.mesh) else self.mesh[REPLICA].size()

    @property
    def shard_size(self) -> int:
        """Ranks that FSDP shards a weight over."""
        return self.data_size // self.replicas

    def facts(self) -> dict[str, Any]:
        """What an attempt runs on, for its first record."""
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        versions["python"] = platform.python_version()
        facts = {"pid": os.getpid(), "ranks": self.size, "threads": torch.get_num_threads(), "versions": versions}
        return facts | origin() if self.is_main else facts

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks, the same on each; in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_of_parts(self, values: Tensor) -> Tensor:
        """As `sum`, of what ranks counted on their rows: ranks that share rows count once."""
        for name in (REPLICA, DATA) if self.replicas > 1 else (DATA,) if self.data_size > 1 else ():
            assert self.mesh is not None
            dist.all_reduce(values, group=self.mesh[name].get_group())
        return values

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks, the same on each; in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item())

    def any_told(self, flag: bool) -> bool:
        """As `any`, over the group for messages: for a thread beside the training."""
        if self.size == 1:
            return flag
        found = torch.tensor([float(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.messages)
        return bool(found)

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

    def scatter(self, values: Sequence[Any]) -> Any:
        """The r-th of rank 0's values, on rank r; what the other ranks give is not looked at.

        A rank receives its own value and no other. Ranks that are given one and the same object cost it once.
        """
        if self.size == 1:
            return values[0]
        length = torch.zeros(1, dtype=torch.int64)
        if not self.is_main:
            dist.scatter(length, src=0, group=self.messages)
            received = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(received, src=0, group=self.messages)
            return pickle.loads(received.numpy().data)
        packed = {id(value): _packed(value) for value in {id(value): value for value in values[1:]}.values()}
        parts = [length, *(packed[id(value)] for value in values[1:])]
        dist.scatter(length, [torch.tensor([len(part)]) for part in parts], src=0, group=self.messages)
        sent = [dist.isend(part, dst=rank, group=self.messages) for rank, part in enumerate(parts) if rank]
        for one in sent:
            assert one is not None  # None only on a rank outside of the group
            one.wait()
        return values[0]

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on rank 0; nothing on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size if self.is_main else []
        dist.gather_object(value, values or None, dst=0, group=self.messages)
        return values

    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks, and receive into others from ranks; all in host memory and contiguous.

        Every rank calls it, though it may have nothing to send; between two ranks goes at most one tensor each way.
        """
        works = [dist.irecv(tensor, source, group=self.messages) for source, tensor in received]
        works += [dist.isend(tensor, rank, group=self.messages) for rank, tensor in sent]
        for work in works:
            assert work is not None  # None only on a rank outside of the group
            work.wait()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def apart(self) -> World:
        """The same ranks with a group of its own for messages, for a thread that must not meet the others' collectives.

        Collective where there are several ranks.
        """
        return self if self.size == 1 else replace(self, messages=_for_messages())


def single_world(gpu: int = 0, dtype: torch.dtype = torch.float32) -> World:
    """One rank on a GPU, by its number, or on the CPU; a mesh of one where it is to have master weights.

    Raises:
        UserError: there is no GPU of that number.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if gpu >= torch.cuda.device_count():
            raise UserError(
                f"training is to run on GPU {gpu}, counted from 0, and {torch.cuda.device_count()} are visible here: "
                "lower what allocation_mode asks for, or check CUDA_VISIBLE_DEVICES and nvidia-smi"
            )
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    if dtype == torch.float32:
        return World(0, 1, device)
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    return World(0, 1, device, _mesh(device, 1, 1, 0), dtype)


def join_world(
    rank: int,
    size: int,
    rendezvous: str,
    gpu: int | None = None,
    dtype: torch.dtype = torch.float32,
    tensor: int = 1,
    shard: int = 0,
    patience: timedelta = RENDEZVOUS_TIMEOUT,
) -> World:
    """Meet the other ranks; gloo on CPU, NCCL where every rank has a GPU.

    Args:
        rank: this one's number. size: how many there are. rendezvous: `file://PATH` among the ranks of one machine,
            `tcp://HOST:PORT` between machines. gpu: number of this rank's GPU among those that it sees; None: its rank.
        dtype: of forward and backward passes. tensor: ranks that share a layer; it divides `size`. shard: ranks, or
            groups of ranks that share layers, that a replica is sharded over; 0: all, which are one replica. patience:
            so long they wait for one another.

    Raises:
        RunError: not all ranks came in time; it says which.
    """
    local = rendezvous.startswith("file://")
    device_index = rank if gpu is None else gpu
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= (size if gpu is None else gpu + 1)
    device = torch.device("cuda", device_index) if on_gpu else torch.device("cpu")
    if local:
        # Ranks of one machine: nothing has to listen on an outward interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=meet(rank, size, rendezvous, patience),
        rank=rank,
        world_size=size,
        timeout=RENDEZVOUS_TIMEOUT,
    )
    return World(rank, size, device, _mesh(device, size, tensor, shard), dtype, _for_messages() if on_gpu else None)


def _for_messages() -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=RENDEZVOUS_TIMEOUT)


def _packed(value: Any) -> Tensor:
    """A value as bytes, [length] uint8."""
    return torch.frombuffer(bytearray(pickle.dumps(value, pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _mesh(device: torch.device, size: int, tensor: int, shard: int) -> DeviceMesh:
    data = size // tensor
    if shard in (0, data):
        return init_device_mesh(device.type, (data, tensor), mesh_dim_names=(DATA, TENSOR))
    return init_device_mesh(device.type, (data // shard, shard, tensor), mesh_dim_names=(REPLICA, DATA, TENSOR))


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def leave_world(world: World) -> None:
    """Close the process group, where there is one."""
    if world.mesh is not None and dist.is_initialized():
        dist.destroy_process_group()


def shard(policy: nn.Module, world: World) -> None:
    """FSDP2 in place: every decoder layer is a unit, the rest (embedding, final norm, head) is the root's."""
    if world.mesh is None:
        return
    half = world.dtype != torch.float32
    precision = MixedPrecisionPolicy(world.dtype, torch.float32) if half else MixedPrecisionPolicy()
    # Where nothing is sharded little is saved by giving the gathered weights back between the passes, but where a base
    # is frozen they are as large as all that is kept of it.
    frozen = any(not parameter.requires_grad for parameter in policy.parameters())
    keep: dict[str, Any] = {} if world.shard_size > 1 or frozen else {"reshard_after_forward": False}
    mesh = world.mesh[REPLICA, DATA] if world.replicas > 1 else world.mesh[DATA]
    for layer in policy.lm.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, mp_policy=precision, **keep)
    fully_shard(policy, mesh=mesh, mp_policy=precision, **keep)


def keeps_whole_gradients(policy: nn.Module, world: World) -> bool:
    """Whether gradients are summed over ranks once a step, not once a micro-batch.

    The sum of the micro-batches is then kept whole on every rank, in float32: on a GPU only where that is a small part.
    """
    if world.device.type != "cuda":
        return True
    parameters = sum(p.numel() for p in policy.parameters() if p.requires_grad) // world.tensor_size
    return 4 * parameters <= WHOLE_GRADIENTS * torch.cuda.get_device_properties(world.device).total_memory


def set_gradient_sync(policy: nn.Module, world: World, last: bool, once: bool) -> None:
    """Say what the next backward pass does with gradients. Over replicas they are summed in the step's `last` alone.

    once: so are they over the ranks of a replica, and each adds them up until then; else they are summed every time.
    """
    if world.mesh is None:
        return
    fsdp = cast(FSDPModule, policy)
    fsdp.set_requires_gradient_sync(last or not once)
    if world.replicas > 1:
        fsdp.set_requires_all_reduce(last)


def give_back(policy: nn.Module) -> None:
    """Let go of weights that were gathered for a forward pass without a backward pass; else they would stay, and be
    taken for the sharded ones.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(parameters: list[nn.Parameter], limit: float, world: World) -> Tensor:
    """Scale gradients to a joint norm of at most `limit`; returns the norm before that, a scalar on the device.

    As torch.nn.utils.clip_grad_norm_, which cannot mix tensors of several meshes (tensor parallel layers and others).
    Each replica adds its norm up in an order of its own, and so does each of the ranks that share layers for what all
    of them have (embedding and head): all take one norm, or their copies would drift apart.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        groups.setdefault(getattr(grad, "device_mesh", None), []).append(grad)
    if len(groups) < 2 and world.replicas == 1:
        return whole(torch.nn.utils.clip_grad_norm_(parameters, limit))
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in groups.values()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    norm = world.max(norm)
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([cast(Any, grad).to_local() for grad in grads], scale)
    return norm


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a sharded tensor; an ordinary one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def counted_here(tensor: Tensor, world: World) -> bool:
    """Whether this rank's part of a tensor is to count where ranks add up what they have: of equal parts one does."""
    if world.mesh is None:
        return True
    sharded = set()
    if isinstance(tensor, DTensor):
        named = zip(_names(tensor.device_mesh), tensor.placements, strict=True)
        sharded = {name for name, place in named if not place.is_replicate()}
    return all(name in sharded or world.mesh.get_local_rank(name) == 0 for name in _names(world.mesh))


def own_region(tensor: Tensor) -> tuple[slice, ...]:
    """The part of the whole tensor that this rank has: a slice of every dimension, with both ends given."""
    shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + count) for start, count in zip(offset, shape, strict=True))


def with_local_part(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor that is sharded as the given one, and has another one's values, on any device; without gradient."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def whole(tensor: Any) -> Tensor:
    """A sharded tensor gathered (collective), an ordinary one as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
