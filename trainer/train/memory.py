"""Whether a model's training fits into a GPU's memory, before anything is put there, and words for when it did not."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import RunConfig
from trainer.errors import RunError, UserError
from trainer.serving.wanted import gives_memory_away
from trainer.train.distributed import World

STATE_BYTES = 16
"""Of a parameter that is trained: float32 weight, gradient and AdamW's two moments; shared out over the ranks."""
WHOLE_BYTES = 4
"""Of a parameter while the model is loaded: every rank has all of it, in float32, until it is shared out."""
GIB = float(1 << 30)


def put_on_device(lm: Any, config: RunConfig, world: World) -> Any:
    """Move a loaded model to this rank's device.

    Raises:
        UserError: its training can never fit there. RunError: it cannot now, beside what else uses the GPU.

    """
    if world.device.type == "cuda":
        free, size = torch.cuda.mem_get_info(world.device)
        parameters = sum(p.numel() for p in lm.parameters())
        problem = room_problem(parameters, world.size, free, size, gives_memory_away(config))
        if problem is not None:
            raise problem
    return lm.to(world.device)


def room_problem(parameters: int, ranks: int, free: int, size: int, shared: bool = False) -> UserError | None:
    """Why `parameters` cannot be trained by `ranks` GPUs of this kind; None when nothing speaks against it.

    Activations are not counted: their part depends on train.max_tokens_per_mb. free, size: bytes of one GPU. shared:
    with a server that gives its memory away before anything is trained.
    """
    whole = WHOLE_BYTES * parameters
    need = max(STATE_BYTES * parameters / ranks, whole)
    needs = (
        f"training {parameters / 1e9:.2f} billion parameters on {ranks} GPUs takes at least {need / GIB:.1f} GiB of "
        f"each, and of {size / GIB:.1f} GiB"
    )
    if need > size:
        return UserError(
            f"{needs} there is too little: give allocation_mode more training GPUs, or choose a smaller model "
            "(`clusterkit presets plan` works it out)"
        )
    if (whole if shared else need) > free:
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
