"""Low-rank adapters (LoRA, Hu et al. 2021) in the linear layers of a model's decoder.

An adapted layer computes W x + b + alpha / rank · B (A x) and trains A and B alone. A is drawn evenly, as PEFT draws
it, and B begins at zero, so that the first outputs are the base model's. The base has the dtype of the passes and no
gradient; A and B are float32 and are cast for the passes by FSDP2, as all trained weights are. Names are PEFT's: a
layer `q_proj` has `q_proj.lora_A.weight` [rank, in] and `q_proj.lora_B.weight` [out, rank].

It is a module of our own, not PEFT's: the base keeps its names and its place in the model, so that loading by parts,
tensor parallel layers, weights for servers and checkpoints see the model that they know.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.config_lora import LoraConfig
from trainer.seeding import derive_seed
from trainer.train.distributed import TENSOR, World, counted_here, local_part, whole, with_local_part
from trainer.train.logprobs import PolicyModel
from trainer.train.packing import PackedBatch
from trainer.train.weightfiles import Region, Shape, Weights

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of an adapter's matrices."""


class LoraLinear(nn.Linear):
    """A linear layer that does not learn, and an adapter that does.

    Args:
        base: whose weight and bias it takes over.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=torch.float32)
        self.scale = scale
        self.enabled = True

    def forward(self, input: Tensor) -> Tensor:
        """W x + b, and what the adapter adds where it is enabled."""
        result = F.linear(input, self.weight, self.bias)
        return result + self.lora_B(self.lora_A(input)) * self.scale if self.enabled else result


def add_adapters(lm: Any, config: LoraConfig, dtype: torch.dtype, seed: int) -> Any:
    """Give a model its adapters, in place; the rest is frozen and gets the dtype of the passes. Nothing for rank 0.

    Adapters on the meta device have no values: `AdaptedWeights` has those that they begin with.

    Raises:
        UserError: the model has no linear layers of the names that are targeted.
    """
    if not config.rank:
        return lm
    lm.requires_grad_(False)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.data = parameter.data.to(dtype)
    linear = {name: module for name, module in lm.named_modules() if isinstance(module, nn.Linear)}
    inside = {name: module for name, module in linear.items() if name.startswith("model.layers.")}
    wanted = config.chosen({name.rpartition(".")[2] for name in inside})
    for name, module in inside.items():
        parent, _, leaf = name.rpartition(".")
        if leaf in wanted:
            adapted = LoraLinear(module, config.rank, config.scale)
            setattr(lm.get_submodule(parent), leaf, adapted)
            for end, matrix in ((A, adapted.lora_A.weight), (B, adapted.lora_B.weight)):
                if not matrix.is_meta:
                    matrix.data.copy_(first_value(name + end, tuple(matrix.shape), seed))
    return lm


def first_value(name: str, shape: Shape, seed: int) -> Tensor:
    """An adapter's matrix before the first step, whole, in float32; it depends on nothing but name, shape and seed."""
    if name.endswith(B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(derive_seed("lora", seed, name))
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_(a=√5), PEFT's and nn.Linear's own
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class AdaptedWeights:
    """Values of a model with adapters: the base's from where they are, the adapters' as they begin.

    lm: the model, on the meta device. See `Weights`.
    """

    def __init__(self, base: Weights, lm: Any, seed: int) -> None:
        self._base, self._seed = base, seed
        self._own: dict[str, Shape] = {n: tuple(p.shape) for n, p in lm.named_parameters() if is_adapter(n)}
        self.shapes: Mapping[str, Shape] = {**base.shapes, **self._own}

    def read(self, name: str, region: Region) -> Tensor:
        """See Weights."""
        if name in self._own:
            return first_value(name, self._own[name], self._seed)[tuple(region)]
        return self._base.read(name, region)

    def place(self, name: str) -> str:
        """See Weights."""
        return "" if name in self._own else self._base.place(name)

    def close(self) -> None:
        """See Weights."""
        self._base.close()


def is_adapter(name: str) -> bool:
    """Whether a parameter of that name is an adapter's."""
    return name.endswith((A, B))


def has_adapters(lm: nn.Module) -> bool:
    """Whether adapters are trained in place of the model's weights."""
    return any(isinstance(module, LoraLinear) for module in lm.modules())


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Have the layers of a model compute what the base alone does."""
    adapted = [module for module in lm.modules() if isinstance(module, LoraLinear)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


class BasePolicy(nn.Module):
    """The base model of a policy with adapters as a policy of its own: it has no memory of its own.

    For log-probs alone, without gradients.
    """

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, batch: PackedBatch, temperature: float, chunk: int) -> tuple[Tensor, Tensor]:
        """See `PolicyModel`."""
        with adapters_off(self.policy):
            found: tuple[Tensor, Tensor] = self.policy(batch, temperature, chunk)
            return found


@dataclass(frozen=True, slots=True)
class Adapter:
    """The matrices of one layer's adapter, whole or sharded as the layer's weight is."""

    a: Tensor
    b: Tensor
    scale: float

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapter's part added, in float32; sharded as it was. Collective where it is.

        Of weights in bfloat16 most of a small part is lost once the sum is rounded to it again.
        """
        sum_of_both = self.merged_part(weight)
        if not isinstance(weight, DTensor):
            return sum_of_both
        return DTensor.from_local(
            sum_of_both, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
            stride=weight.stride(),
        )  # fmt: skip

    @torch.no_grad()
    def merged_part(self, weight: Tensor) -> Tensor:
        """This rank's part of `merged`, where its part of the weight is: the adapter may be on another device."""
        own = local_part(weight)
        b, a = (matrix.float().to(own.device) for matrix in (local_part(self.b), _all_rows(self.a)))
        return own.float() + self.scale * (b @ a)

    @torch.no_grad()
    def on(self, device: torch.device) -> Adapter:
        """The adapter on a device, sharded as it was; the same tensors where they are there."""
        a, b = (with_local_part(matrix, local_part(matrix).to(device)) for matrix in (self.a, self.b))
        return Adapter(a, b, self.scale)

    def gathered(self) -> Adapter:
        """A copy of the adapter, whole and in host memory. Collective where it is sharded."""
        a, b = (whole(matrix).detach().to("cpu", copy=True) for matrix in (self.a, self.b))
        return Adapter(a, b, self.scale)


@torch.no_grad()
def base_digest(lm: nn.Module, world: World) -> str:
    """Digest of the weights that adapters belong to, the same however they are shared out; empty without adapters.

    Collective. A sum over the bits of each weight: it is to tell models apart that nobody has made alike on purpose,
    and costs one read of what this rank has.
    """
    if not has_adapters(lm):
        return ""
    base = [(name, parameter) for name, parameter in lm.named_parameters() if not is_adapter(name)]
    sums = torch.stack([_sum_of_bits(parameter, world).to(world.device) for _, parameter in base])
    told = [f"{name}={number}" for (name, _), number in zip(base, world.sum(sums).tolist(), strict=True)]
    return hashlib.sha256("\n".join(sorted(told)).encode()).hexdigest()


def _sum_of_bits(tensor: Tensor, world: World) -> Tensor:
    """Sum of the numbers that a weight's bits are, over what of it is counted on this rank."""
    local = local_part(tensor)
    if not counted_here(tensor, world):
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return local.view(torch.int32 if local.element_size() == 4 else torch.int16).sum(dtype=torch.int64)


def split_state(lm: nn.Module, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Adapter]]:
    """A model's tensors by name without its adapters, and these by the name of the weight that they belong to."""
    base = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    scales = {name: module.scale for name, module in lm.named_modules() if isinstance(module, LoraLinear)}
    adapters = {f"{name}.weight": Adapter(state[name + A], state[name + B], scale) for name, scale in scales.items()}
    return base, adapters


def _all_rows(tensor: Tensor) -> Tensor:
    """All rows of A that belong to this rank's columns; FSDP2 has shared the rows out."""
    if not isinstance(tensor, DTensor):
        return tensor
    names = tensor.device_mesh.mesh_dim_names or ()
    places = [place if name == TENSOR else Replicate() for name, place in zip(names, tensor.placements, strict=True)]
    return tensor.redistribute(placements=places).to_local()
