"""What decoder layers do in training beside computing: recompute activations, run compiled, or both.

Only the packed forward passes of training are changed. A forward pass with a cache or without packed rows (sampling by
the embedded engine, which may share the layers) stays as transformers wrote it. Nothing is registered with the modules,
so names in state dicts stay as they are and FSDP's hooks stay outside.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.config_parts import CHUNKED
from trainer.errors import UserError
from trainer.train import varlen
from trainer.train.chunks import by_chunks
from trainer.train.offload import host_room

Checkpointing = Literal["none", "selective", "full", "chunked", "offloaded"]
Forward = Callable[..., Any]

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
BACKEND = "inductor"
# More compilations of the layers than this mean that something changes with every batch; it then runs uncompiled.
MOST_COMPILATIONS = 16


def prepare_layers(lm: Any, checkpointing: Checkpointing, compiled: bool) -> None:
    """Give every decoder layer of a transformers model its way of training, in place. Do it before FSDP shards it."""
    if checkpointing == "none" and not compiled:
        return
    if compiled:
        varlen.flash()  # found out now: it cannot be while the layers are traced
        torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, MOST_COMPILATIONS)
    rank = next((module.lora_A.out_features for module in lm.model.layers.modules() if hasattr(module, "lora_A")), 0)
    for layer in lm.model.layers:
        if checkpointing in CHUNKED:
            if not hasattr(layer, "mlp"):
                raise UserError(
                    f"model.gradient_checkpointing={checkpointing}: layers of {type(lm).__name__} have no `mlp` "
                    "that could be computed by pieces: set model.gradient_checkpointing=full"
                )
            # Compiled by itself: how many pieces there are must not be part of the layer's code.
            part = torch.compile(layer.mlp.forward, dynamic=True, backend=BACKEND) if compiled else layer.mlp.forward
            layer.mlp.forward = by_chunks(layer.mlp, part)
        layer.forward = _in_training(layer, checkpointing, compiled, rank)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile makes fast code for the device here: a GPU, Triton and a C compiler."""
    return (
        device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    )


def _in_training(layer: Any, checkpointing: Checkpointing, compiled: bool, rank: int) -> Forward:
    plain: Forward = layer.forward
    work = plain
    if checkpointing in CHUNKED:
        if compiled:
            work = torch.compile(work, backend=BACKEND)
        work = functools.partial(checkpoint, work, use_reentrant=False)
        if checkpointing == "offloaded":
            work = _with_inputs_on_host(work)
    elif checkpointing != "none":
        selective = functools.partial(_selective, rank)
        more: dict[str, Any] = {"context_fn": selective} if checkpointing == "selective" else {}
        work = functools.partial(checkpoint, plain, use_reentrant=False, **more)
    if compiled and checkpointing not in CHUNKED:
        work = torch.compile(work, backend=BACKEND)

    @functools.wraps(plain)
    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("row_ends") is not None or kwargs.get("packed_layout") is not None
        if not packed or (not compiled and not torch.is_grad_enabled()):
            return plain(hidden_states, *args, **kwargs)
        if compiled:
            _mark_lengths(hidden_states, kwargs)
        return work(hidden_states, *args, **kwargs)

    return forward


def _with_inputs_on_host(work: Forward) -> Forward:
    """A checkpointed forward pass whose inputs wait for the backward pass in host memory. The copies take their turn
    among the GPU's own work, which is much more (docs/scale.md).
    """

    def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
        if tensor.is_cuda and tensor.numel():
            return tensor.device, host_room(tensor, gpu=True).copy_(tensor, non_blocking=True)
        return tensor.device, tensor

    def from_host(kept: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = kept
        return tensor.to(device, non_blocking=True)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # What the layer itself saves goes to the checkpoint's own hooks.
        with torch.autograd.graph.saved_tensors_hooks(to_host, from_host):
            return work(*args, **kwargs)

    return forward


def _mark_lengths(hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Say which sizes differ from batch to batch, so that one compilation serves them all."""
    torch._dynamo.maybe_mark_dynamic(hidden, 1)
    for tensor in kwargs.get("position_embeddings") or ():
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for name, dim in (("position_ids", 1), ("row_ends", 0), ("key_ends", 0), ("key_index", 0)):
        if isinstance(tensor := kwargs.get(name), Tensor):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _selective(rank: int) -> Any:
    """Keep what attention returns and every second matrix product, recompute the rest (as torchtitan's selective
    activation checkpointing does): about half of the memory for a tenth of the time.

    rank: of adapters, whose products are recomputed: they cost little, and are as large as their layers'. 0: none.
    """
    products = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *operands: Any, **_: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS and rank and rank in operands[-1].shape:
            keep = False
        elif operation in _PRODUCTS:
            products[context.is_recompute] += 1
            keep = products[context.is_recompute] % 2 == 1
        else:
            keep = operation in _ATTENTION or operation.namespace in ("torch_attn", "flash_attn", "clusterkit")
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
