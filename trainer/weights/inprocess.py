"""Publishing to the embedded engine.

One rank: engine and trainer share the parameters, nothing is copied. Several ranks: the trainer's parameters are
sharded, so every rank keeps an unsharded replica for sampling and gathers the new weights into it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from trainer.train.distributed import World
from trainer.train.logprobs import PolicyModel


def sampling_copy(lm: Any, world: World) -> Any:
    """The model that the embedded engine samples from: `lm` itself, or a replica made before `lm` is sharded."""
    if world.size == 1:
        return lm
    replica = copy.deepcopy(lm)
    replica.requires_grad_(False)
    return replica


@torch.no_grad()
def refresh(replica: Any, policy: PolicyModel, world: World) -> None:
    """Gather the sharded weights into the replica, parameter by parameter. Collective."""
    if world.size == 1:
        return
    targets = dict(replica.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        targets[name].copy_(parameter.full_tensor())
