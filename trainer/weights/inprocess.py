"""Publishing to the embedded engine.

One rank in float32: engine and trainer share the parameters, nothing is copied. Several ranks, or a bfloat16 policy
whose weights in the trainer are float32: every rank keeps an unsharded replica for sampling, in the dtype of the
forward passes, and gathers the new weights into it.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.train.distributed import World
from trainer.train.logprobs import PolicyModel
from trainer.train.model import copy_in


def sampling_copy(lm: Any, world: World) -> Any:
    """The model that the embedded engine samples from: `lm` itself, or a replica made before `lm` is sharded."""
    return lm if world.mesh is None else copy_in(lm, world.dtype)


@torch.no_grad()
def refresh(replica: Any, policy: PolicyModel, world: World) -> None:
    """Gather the sharded weights into the replica, parameter by parameter. Collective."""
    if world.mesh is None:
        return
    targets = dict(replica.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        targets[name].copy_(parameter.full_tensor())
