"""The norm that gradients are scaled by, where ranks have copies of the same weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from trainer.train.distributed import DATA, TENSOR, World, clip_gradients, local_part, single_world


class Sharing(World):
    """One of two ranks that share layers; the other one's norm came out larger."""

    tensor_size = 2

    def max(self, values: Tensor) -> Tensor:
        return 2 * values


def test_ranks_that_share_layers_scale_by_one_norm() -> None:
    """Each adds up the norm of embedding and head over ranks of its own, which may differ by a rounding."""
    one = single_world(dtype=torch.bfloat16)
    assert one.mesh is not None
    world = Sharing(one.rank, one.size, one.device, one.mesh, one.dtype)
    parameters = []
    for mesh in (one.mesh[DATA], one.mesh[DATA, TENSOR]):  # embedding or head, and a layer's
        whole = DTensor.from_local(torch.zeros(2), mesh, [Replicate()] * mesh.ndim)
        parameters.append(nn.Parameter(whole))
        parameters[-1].grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Replicate()] * mesh.ndim)

    norm = clip_gradients(parameters, 1.0, world)

    assert torch.allclose(norm, torch.tensor(2 * 50**0.5))
    for parameter in parameters:
        assert parameter.grad is not None
        assert torch.allclose(local_part(parameter.grad), torch.tensor([3.0, 4.0]) / norm)
