"""Whether a model's training fits into a GPU's memory, before anything is put there, and words for when it did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import RunConfig
from trainer.config_parts import CHUNKED, LESS_MEMORY
from trainer.errors import RunError, UserError
from trainer.placement import gives_memory_away
from trainer.train.distributed import World
from trainer.train.lora import is_adapter
from trainer.train.model import compute_dtype

STATE_BYTES = 16
"""Of a parameter that is trained: float32 weight, gradient and AdamW's two moments; shared out over the ranks."""
WEIGHT_BYTES = 4
"""Of a parameter that is trained, before the first step."""
GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What training takes of one rank's GPU at least; activations come on top, by train.max_tokens_per_mb.

    parameters: of the model. ranks: that share them. loaded: bytes once the model is there; trained: in a step.
    """

    parameters: int
    ranks: int
    loaded: int
    trained: int

    @classmethod
    def of(cls, lm: Any, config: RunConfig, ranks: int, tensor: int = 1, sharded: bool = True) -> Footprint:
        """Of a model, on the meta device or not.

        ranks: that a replica is sharded over; tensor: those of them that share a layer. sharded: the weights are FSDP's
            (one rank, too).
        """
        adapters = sum(p.numel() for n, p in lm.named_parameters() if is_adapter(n))
        whole = sum(p.numel() for p in lm.parameters()) - adapters
        layers = [sum(p.numel() for n, p in layer.named_parameters() if not is_adapter(n)) for layer in lm.model.layers]
        rest = whole - sum(layers)  # embedding, last norm and head are whole on all ranks that share a layer
        own = sum(layers) / ranks + rest * tensor / ranks
        width = compute_dtype(config.model).itemsize
        beside = 0.0
        if config.algorithm.kl_coef > 0 and not adapters:
            beside += width * own  # the reference
        if sharded and config.engine == "embedded":
            beside += width * whole  # what samples
        gathered = 0.0
        if sharded:  # weights to compute with: of one layer, or all where they are not given back between the passes
            kept = ranks == tensor and not adapters
            gathered = width * (rest + (sum(layers) if kept else max(layers, default=0)) / tensor)
        # A frozen base has the dtype of the passes, and neither gradients nor moments.
        loaded, trained = (width * own, width * own) if adapters else (WEIGHT_BYTES * own, STATE_BYTES * own)
        loaded, trained = loaded + WEIGHT_BYTES * adapters / ranks, trained + STATE_BYTES * adapters / ranks
        return cls(whole, ranks, round(loaded + beside), round(trained + beside + gathered))


def require_room(lm: Any, config: RunConfig, world: World) -> None:
    """See that training a model can fit into this rank's GPU, before anything of it is put there.

    Raises:
        UserError: it can never fit there. RunError: it cannot now, beside what else uses the GPU.
    """
    if world.device.type == "cuda":
        free, size = torch.cuda.mem_get_info(world.device)
        problem = room_problem(_footprint(lm, config, world), free, size, gives_memory_away(config))
        if problem is not None:
            raise problem


def _footprint(lm: Any, config: RunConfig, world: World) -> Footprint:
    replica = world.shard_size * world.tensor_size
    return Footprint.of(lm, config, replica, world.tensor_size, world.mesh is not None)


def require_row_room(lm: Any, config: RunConfig, world: World, tokens: int) -> None:
    """See that a step with a row of so many tokens can fit into this rank's GPU.

    Raises:
        UserError: it can never fit there.
    """
    if world.device.type == "cuda":
        size = torch.cuda.get_device_properties(world.device).total_memory
        footprint = _footprint(lm, config, world)
        problem = row_problem(footprint, tokens, row_bytes(lm.config, config, tokens, world.tensor_size), size, config)
        if problem is not None:
            raise problem


def row_bytes(model: Any, config: RunConfig, tokens: int, tensor: int = 1) -> int:
    """What the activations of one row take at least, in a backward pass that is at its last layer.

    model: its transformers configuration. tensor: ranks that share a layer.
    """
    kind = config.model.gradient_checkpointing
    kept = 1 if kind == "offloaded" else model.num_hidden_layers  # inputs of layers
    # At work: the layer's input, its queries, what attention returns, a gradient; gate, product and a gradient.
    wide = 0 if kind in CHUNKED else 3 * model.intermediate_size
    return int(compute_dtype(config.model).itemsize * tokens * ((kept + 4) * model.hidden_size + wide) // tensor)


def row_problem(footprint: Footprint, tokens: int, row: int, size: int, config: RunConfig) -> UserError | None:
    """Why rows of so many tokens cannot be trained on with GPUs of this kind; None when nothing speaks against it.

    row: bytes of its activations. size: bytes of one GPU.
    """
    if footprint.trained + row <= size:
        return None
    less = LESS_MEMORY.get(config.model.gradient_checkpointing)
    ways = [f"set model.gradient_checkpointing={less}"] if less else []
    ways += [
        "lower the agent's limits on what it reads and writes",
        "give allocation_mode more training GPUs (or a larger s)",
    ]
    return UserError(
        f"a conversation may have {tokens:,} tokens, and training on one takes at least {row / GIB:.1f} GiB of a GPU "
        f"beside the {footprint.trained / GIB:.1f} for the weights and the optimizer; there are {size / GIB:.1f}: "
        f"{', or '.join(ways)}"
    )


def room_problem(footprint: Footprint, free: int, size: int, shared: bool = False) -> UserError | None:
    """Why a model cannot be trained on GPUs of this kind; None when nothing speaks against it.

    free, size: bytes of one GPU. shared: with a server that gives its memory away before anything is trained.
    """
    need = footprint.trained
    needs = (
        f"training {footprint.parameters / 1e9:.2f} billion parameters on {footprint.ranks} GPUs takes at least "
        f"{need / GIB:.1f} GiB of each, and of {size / GIB:.1f} GiB"
    )
    if need > size:
        return UserError(
            f"{needs} there is too little: give allocation_mode more training GPUs (or a larger s), train low-rank "
            "adapters (model.lora.rank=32), or choose a smaller model (`clusterkit presets plan` works it out)"
        )
    if (footprint.loaded if shared else need) > free:
        return RunError(
            f"{needs} only {free / GIB:.1f} are free: end what else uses the GPU (nvidia-smi shows it), or lower "
            "rollout.gpu_memory_fraction where a server shares it; the same command goes on then"
        )
    return None


def out_of_memory(error: torch.OutOfMemoryError) -> RunError:
    """What to say when a GPU's memory ran out outside of a training step, which says more itself."""
    return RunError(
        f"a GPU ran out of memory ({str(error).splitlines()[0].rstrip('.')}): end what else uses it (nvidia-smi shows "
        "it), lower rollout.gpu_memory_fraction where a server shares it, or take more GPUs; the same command then "
        "goes on from the last recover checkpoint"
    )
