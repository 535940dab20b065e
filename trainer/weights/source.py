"""The trained weights as engines take them: whole, in the dtype that they compute in; for servers bucket by bucket."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard

from trainer.train.distributed import DATA, World, local_part
from trainer.train.learner import Learner
from trainer.train.logprobs import PolicyModel
from trainer.train.lora import Adapter, split_state
from trainer.weights.buckets import Bucket, Piece, plan_buckets

PREFIX = "lm."


class WeightSource:
    """Reads the policy's present weights into buffers of this rank's device.

    Args:
        learner: whose policy, sharded over `learner.world` or not.
        bucket_bytes: of one buffer.
        dtype: that the servers keep floating-point weights in.
        everywhere: every rank gets the weights, not rank 0 alone.
    """

    def __init__(
        self, learner: Learner, bucket_bytes: int, dtype: torch.dtype = torch.bfloat16, *, everywhere: bool = False
    ) -> None:
        self.learner = learner
        self.world: World = learner.world
        self.dtype, self.everywhere = dtype, everywhere
        self.buckets = plan_buckets(
            (
                Piece(name, dtype if t.is_floating_point() else t.dtype, tuple(t.shape))
                for name, t in served_state(learner)[0].items()
            ),
            bucket_bytes,
        )
        self._state: dict[str, Tensor] = {}
        self._adapters: dict[str, Adapter] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        return {piece.name: piece.shape for bucket in self.buckets for piece in bucket.pieces}

    def buffer(self) -> Tensor:
        """A buffer for any of the buckets, [bytes] uint8 on this rank's device."""
        size = max((bucket.nbytes for bucket in self.buckets), default=0)
        return torch.empty(size, dtype=torch.uint8, device=self.world.device)

    def open(self) -> None:
        """Take hold of the present weights. Every rank, before `fill`; nothing may train until `close`."""
        self._state, self._adapters = served_state(self.learner)

    def close(self) -> None:
        """Let go of the weights."""
        self._state, self._adapters = {}, {}

    @torch.no_grad()
    def fill(self, bucket: Bucket, flat: Tensor | None) -> None:
        """Put a bucket's weights into rank 0's buffer, or into every rank's. Collective, the same buckets in order.

        On a GPU this only queues work on the current stream.

        Args:
            flat: this rank's buffer, at least bucket.nbytes of uint8; None on ranks that get nothing.
        """
        names = [piece.name for piece in bucket.pieces]
        views = dict(zip(names, bucket.views(flat), strict=True)) if flat is not None else {}
        tensors = {name: self._merged(name) for name in names}
        by_rows = [piece for piece in bucket.pieces if _split_by_rows(tensors[piece.name], self.world)]
        if by_rows:
            self._gather(by_rows, [local_part(tensors[piece.name]) for piece in by_rows], views)
        rest = [piece for piece in bucket.pieces if piece not in by_rows]
        whole = [_whole(tensors[piece.name], piece.dtype) for piece in rest]
        if views and rest:
            _copy([views[piece.name] for piece in rest], whole)

    def _merged(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        return self._state[name] if adapter is None else adapter.merged(self._state[name])

    def _gather(self, pieces: list[Piece], locals_: list[Tensor], views: dict[str, Tensor]) -> None:
        """Bring the row shards of several tensors together in one message a rank; each casts its own first.

        Every replica has all of them: rank 0's sends them to it, or each keeps them to itself.
        """
        assert self.world.mesh is not None
        mesh, device = self.world.mesh[DATA], self.world.device
        size, group = mesh.size(), mesh.get_group()
        if not self.everywhere and dist.get_global_rank(group, 0):
            return
        # FSDP2 splits rows as torch.chunk does: all ranks but the last ones have the same number.
        rows = [-(-piece.shape[0] // size) for piece in pieces]
        slot = [count * (piece.nbytes // piece.shape[0]) for count, piece in zip(rows, pieces, strict=True)]
        starts = [sum(slot[:i]) for i in range(len(slot))]
        sent = torch.empty(sum(slot), dtype=torch.uint8, device=device)

        def part(message: Tensor, index: int, rank: int) -> Tensor:
            piece = pieces[index]
            count = max(0, min(rows[index], piece.shape[0] - rank * rows[index]))
            end = starts[index] + count * (piece.nbytes // piece.shape[0])
            return message[starts[index] : end].view(piece.dtype).view(count, *piece.shape[1:])

        everyone = range(len(pieces))
        _copy([part(sent, i, mesh.get_local_rank()) for i in everyone], locals_)
        received = [torch.empty_like(sent) for _ in range(size)] if views else None
        if self.everywhere:
            assert received is not None
            dist.all_gather(received, sent, group=group)
        else:
            dist.gather(sent, received, dst=0, group=group)
        for rank, message in enumerate(received or []):
            parts = [part(message, i, rank) for i in everyone]
            first = [rank * count for count in rows]
            into = [
                views[piece.name][row : row + len(own)]
                for piece, row, own in zip(pieces, first, parts, strict=True)
            ]  # fmt: skip
            _copy(into, parts)


def served_state(learner: Learner) -> tuple[dict[str, Tensor], dict[str, Adapter]]:
    """Hugging Face name -> weight or shard of it, tied weights once; name -> the adapter that is to be merged into it.

    Only looks, moves nothing between ranks.
    """
    state: dict[str, Any] = get_model_state_dict(learner.policy)
    tied = tied_names(learner.policy.lm)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    return split_state(learner.policy.lm, {name: tensor for name, tensor in named.items() if name not in tied})


def tied_names(lm: Any) -> set[str]:
    """Names of weights that are another weight under a second name (a head that is the embedding)."""
    if not getattr(lm.config, "tie_word_embeddings", False):
        return set()
    return set(getattr(lm, "all_tied_weights_keys", None) or {})


@torch.no_grad()
def refresh(replica: Any, policy: PolicyModel, world: World) -> None:
    """Publish to the embedded engine: gather the sharded weights into the replica, parameter by parameter. Collective.

    One rank in float32: engine and trainer share the parameters, nothing is copied. Several ranks, or a bfloat16 policy
    whose weights in the trainer are float32: every rank keeps an unsharded replica for sampling, in the dtype of the
    forward passes.
    """
    if world.mesh is None:
        return
    targets = dict(replica.named_parameters())
    for name, parameter in policy.lm.named_parameters():
        if parameter.requires_grad:  # a base with adapters stays as it is
            targets[name].copy_(parameter.full_tensor())


def _split_by_rows(tensor: Tensor, world: World) -> bool:
    """Whether every rank of a replica holds some rows of it, and nothing else is to be known."""
    if not isinstance(tensor, DTensor) or tensor.ndim == 0:
        return False
    *replicas, last = tensor.placements
    return (
        world.shard_size > 1
        and world.tensor_size == 1
        and all(place.is_replicate() for place in replicas)
        and isinstance(last, Shard)
        and last.dim == 0
    )


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.to(dtype).full_tensor()  # type: ignore[attr-defined]
    return whole


def _copy(into: list[Tensor], out_of: list[Tensor]) -> None:
    """Copy many tensors, casting, in few kernels."""
    pairs = [(a, b) for a, b in zip(into, out_of, strict=True) if a.numel()]
    if pairs:
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs], non_blocking=True)
