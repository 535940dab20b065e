"""Tensor parallel layers: the heads of attention and the columns of the feed-forward part, shared out over ranks.

Column-wise, then row-wise (Shoeybi et al. 2019, "Megatron-LM"). Between the parts of a layer each rank has its share of
the packed row's tokens, norms them and adds them up (sequence parallel, Korthikanti et al. 2022): where a part begins
the row is gathered, and where it ends, sums are scattered, which together costs what one sum over the ranks would. So
what checkpointing keeps of a layer is shared out, too. The ranks divide the row: `pack` fills it up. Embedding and
output layer stay whole on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainer.config import RunConfig
from trainer.errors import UserError
from trainer.train.distributed import TENSOR, World

FAMILIES = ("llama", "qwen2", "qwen3")
WHOLE, BY_TOKENS = Replicate(), Shard(1)
"""Hidden states [1, tokens, width] on the ranks that share a layer."""


def tensor_degree(config: RunConfig) -> int:
    """Ranks that share a layer: the t of the training part of allocation_mode."""
    mode = config.allocation
    return mode.training.layout.tensor if mode is not None and mode.training is not None else 1


def shard_ranks(config: RunConfig) -> int:
    """Data parallel ranks that a replica is sharded over: the s of the training part; 0: all, which are one replica."""
    mode = config.allocation
    return mode.training.layout.shard if mode is not None and mode.training is not None else 0


def check_split(model: Any, ranks: int) -> None:
    """Raise UserError unless that many ranks can share the layers of a model. model: its transformers configuration."""
    if ranks == 1:
        return
    if model.model_type not in FAMILIES:
        raise UserError(
            f"tensor parallel training knows {', '.join(FAMILIES)}, and this model is {model.model_type}: give the "
            "training side of allocation_mode data parallel GPUs (d) in place of t"
        )
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if heads % ranks or groups % ranks or model.intermediate_size % ranks:
        raise UserError(
            f"allocation_mode: {ranks} tensor parallel training ranks do not divide {heads} attention heads, {groups} "
            f"key/value heads and {model.intermediate_size} feed-forward columns: choose a t that divides all three"
        )


class _ByColumns(ColwiseParallel):
    """As its base, of layers with an adapter, too: A is whole on all ranks, B is shared out as the weight is."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _share_out(module, device_mesh, {"weight": Replicate() if name == "lora_A" else Shard(0), "bias": Shard(0)})


class _ByRows(RowwiseParallel):
    """As its base, of layers with an adapter, too: A is shared out as the weight is, B is whole on all ranks."""

    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        _share_out(module, device_mesh, {"weight": Replicate() if name == "lora_B" else Shard(1), "bias": Replicate()})


def _share_out(module: nn.Module, mesh: DeviceMesh, placements: dict[str, Placement]) -> None:
    """Make DTensors of a module's own parameters; those of modules within it have their turn."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter, mesh, [placements[name]])
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def split_layers(lm: Any, world: World) -> None:
    """Share the layers of a transformers model out over the ranks of a row of the mesh, in place.

    Do it before FSDP shards it, and before `prepare_layers`: pieces of a feed-forward part are gathered one at a time.

    Raises:
        UserError: the architecture is not known here, or the ranks do not divide its heads.
    """
    if world.mesh is None or world.tensor_size == 1:
        return
    check_split(lm.config, world.tensor_size)
    mesh = world.mesh[TENSOR]
    trained = {name: parameter.requires_grad for name, parameter in lm.named_parameters()}
    for layer in lm.model.layers:
        plan: dict[str, Any] = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": BY_TOKENS}, desired_input_kwarg_layouts={"hidden_states": WHOLE}
            ),
            "self_attn.q_proj": _ByColumns(),
            "self_attn.k_proj": _ByColumns(),
            "self_attn.v_proj": _ByColumns(),
            "self_attn.o_proj": _ByRows(output_layouts=BY_TOKENS),
            "post_attention_layernorm": SequenceParallel(use_local_output=True),
            "mlp.gate_proj": _ByColumns(),
            "mlp.up_proj": _ByColumns(),
            "mlp.down_proj": _ByRows(output_layouts=BY_TOKENS),
        }
        for norm in ("q_norm", "k_norm"):
            if hasattr(layer.self_attn, norm):
                # Every rank norms its own heads [1, tokens, heads, d] with one weight: its gradient is summed.
                plan[f"self_attn.{norm}"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        parallelize_module(layer, mesh, plan)
        layer.mlp.forward = _gathering(layer.mlp.forward, mesh)
    share = PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=BY_TOKENS, use_local_output=True)
    parallelize_module(lm.model, mesh, {"layers.0": share, "norm": SequenceParallel()})
    gather = PrepareModuleOutput(output_layouts=BY_TOKENS, desired_output_layouts=WHOLE)
    parallelize_module(lm.model.norm, mesh, gather)
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(trained[name])  # SequenceParallel has frozen norms learn


def _gathering(part: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """A part of a layer for the tokens of all ranks; each gives its own, as many as the others."""

    def forward(hidden: Tensor) -> Tensor:
        return part(DTensor.from_local(hidden, mesh, [BY_TOKENS], run_check=False).redistribute(placements=[WHOLE]))

    return forward


def parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for AdamW: matrices decay, biases and norms do not. Its list operations take tensors of one mesh at a
    time, so tensor parallel weights are groups of their own.
    """
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    for parameter in trained:
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((parameter.ndim < 2, 0 if mesh is None else mesh.ndim), []).append(parameter)
    if len({dimensions for _, dimensions in groups}) < 2:  # also where a kind is empty: checkpoints know two groups
        kinds = [[p for p in trained if (p.ndim < 2) is plain] for plain in (False, True)]
    else:
        kinds = [groups[key] for key in sorted(groups)]
    return [{"params": kind, "weight_decay": weight_decay if kind and kind[0].ndim >= 2 else 0.0} for kind in kinds]
