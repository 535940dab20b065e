"""The weights of all ranks as safetensors files, without a rank that ever holds the whole model.

Every file is written by one rank, tensor by tensor: the others send it what they have of the next one. So a rank needs
memory for one whole tensor beside its own weights, every byte is written once, and no two hosts write into the same
file, which shared file systems do not all bear.

PyTorch's `HuggingFaceStorageWriter` (2.13) writes shards first and merges them then: twice the bytes, and the room on
the disk. A shard that a host does not see yet, as NFS allows, is zeros in the merged file without a word; merging on
all ranks is a private function; its files lack the `format` in their header and are not synced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.disk import naming
from trainer.files import write_atomic
from trainer.train.distributed import World, local_part, own_region
from trainer.train.weightfiles import INDEX, SINGLE
from trainer.weights.buckets import Bucket, Piece, plan_buckets
from trainer.weights.folders import caught

FILE_BYTES = 4 << 30
"""Most bytes of a file, unless a single tensor has more."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Place = tuple[tuple[int, int], ...]
"""Where a part lies in a tensor: beginning and end in every dimension."""


@dataclass(frozen=True, slots=True)
class Shards:
    """This rank's part of the weights.

    pieces: all tensors, as they are to be written; the same on every rank. parts: what this rank has of each, by name,
    on any device and in any floating-point dtype. places: where that lies in the whole tensor.
    """

    pieces: tuple[Piece, ...]
    parts: dict[str, Tensor]
    places: dict[str, Place]

    @classmethod
    def of(cls, state: Mapping[str, Tensor], dtype: torch.dtype) -> Shards:
        """From a state dict, sharded or not. Only looks: the parts are the tensors' own memory."""
        state = dict(sorted(state.items()))  # whatever order a rank's modules have them in
        return cls(
            tuple(Piece(n, dtype if t.is_floating_point() else t.dtype, tuple(t.shape)) for n, t in state.items()),
            {name: local_part(tensor) for name, tensor in state.items()},
            {name: tuple((p.start, p.stop) for p in own_region(tensor)) for name, tensor in state.items()},
        )


def write_shards(shards: Shards, folder: Path, world: World) -> None:
    """Write all weights to `folder`, which is there, and make them durable; rank 0 writes the index of several files.

    Collective. Raises what went wrong on the ranks where it did: an OSError after all have sent what the others need.
    Where a rank cannot send or receive, none is left waiting for it: the others return with their files cut short. So
    the callers have to agree on whether all is written.
    """
    files = plan_buckets(shards.pieces, FILE_BYTES)
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    holders = _holders(world.gather(shards.places))
    for piece in shards.pieces:
        covered = sum(prod(end - start for start, end in place) for place in holders[piece.name])
        assert covered == prod(piece.shape), f"the ranks hold {covered} numbers of {piece}"
    # Files are spread over the ranks, and so over the hosts.
    jobs: list[list[tuple[Path, Bucket]]] = [[] for _ in range(world.size)]
    for number, (name, bucket) in enumerate(zip(names, files, strict=True)):
        jobs[number * world.size // count].append((folder / name, bucket))
    sink = _sink(jobs[world.rank])
    problem = caught(lambda: next(sink))
    order = [[piece for _, bucket in job for piece in bucket.pieces] for job in jobs]
    for turn in range(max(map(len, order))):
        wanted = [pieces[turn] if turn < len(pieces) else None for pieces in order]
        try:
            parcel, stuck = _prepare(shards.parts, wanted, holders, turn, world), None
        except Exception as error:  # no memory, say
            parcel, stuck = None, error
        if world.any_told(parcel is None):
            sink.close()
            if stuck is not None:
                raise stuck
            return
        assert parcel is not None
        whole = _exchange(parcel, world)
        if whole is not None and problem is None:
            problem = caught(partial(sink.send, whole))
    sink.close()
    if problem is not None:
        raise problem
    if world.is_main and count > 1:
        index = {
            "metadata": {"total_size": sum(bucket.nbytes for bucket in files)},
            "weight_map": {p.name: name for name, bucket in zip(names, files, strict=True) for p in bucket.pieces},
        }
        write_atomic(folder / INDEX, json.dumps(index, indent=1))


def _holders(places: list[dict[str, Place]]) -> dict[str, dict[Place, list[int]]]:
    """By tensor, its parts that are not empty, and the ranks that have each."""
    found: dict[str, dict[Place, list[int]]] = {}
    for rank, its in enumerate(places):
        for name, place in its.items():
            parts = found.setdefault(name, {})
            if all(start < end for start, end in place):
                parts.setdefault(place, []).append(rank)
    return found


@dataclass(frozen=True, slots=True)
class _Parcel:
    """What this rank sends and receives in one turn.

    whole: the tensor that it writes next, filled by the exchange; None where it has written all of its own.
    sent, received: to and from ranks.
    later: parts of `whole` that are not contiguous, and what they are received in.
    """

    whole: Tensor | None
    sent: list[tuple[int, Tensor]]
    received: list[tuple[int, Tensor]]
    later: list[tuple[Tensor, Tensor]]


def _prepare(
    parts: dict[str, Tensor],
    wanted: list[Piece | None],
    holders: dict[str, dict[Place, list[int]]],
    turn: int,
    world: World,
) -> _Parcel:
    """Have memory for a turn, and this rank's own parts in it.

    wanted: by rank, the tensor that it writes next. turn: copies of a part are sent by their holders in turn.
    """
    own = wanted[world.rank]
    parcel = _Parcel(torch.empty(own.shape, dtype=own.dtype) if own is not None else None, [], [], [])
    tasks = [(rank, piece, *part) for rank, piece in enumerate(wanted) if piece for part in holders[piece.name].items()]
    for writer, piece, place, ranks in tasks:
        sender = writer if writer in ranks else ranks[turn % len(ranks)]
        if world.rank == writer:
            assert parcel.whole is not None
            target = parcel.whole[tuple(slice(start, end) for start, end in place)]
            if sender == writer:
                target.copy_(parts[piece.name])
                continue
            room = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
            parcel.received.append((sender, _bytes(room)))
            if room is not target:
                parcel.later.append((target, room))
        elif world.rank == sender:
            parcel.sent.append((writer, _bytes(parts[piece.name].to("cpu", piece.dtype).contiguous())))
    return parcel


def _exchange(parcel: _Parcel, world: World) -> Tensor | None:
    """Have every rank get the tensor that it is to write; returns this rank's. Collective."""
    if world.size > 1:
        world.exchange(parcel.sent, parcel.received)
    for target, room in parcel.later:
        target.copy_(room)
    return parcel.whole


def _sink(files: list[tuple[Path, Bucket]]) -> Generator[None, Tensor, None]:
    """Takes the tensors of some files in order, and writes these one after the other. Raises OSError."""
    for path, bucket in files:
        with naming(path), path.open("wb") as file:
            file.write(_header(bucket))
            for _ in bucket.pieces:
                file.write(_bytes((yield)).numpy().data)
            file.flush()
            os.fsync(file.fileno())
    yield


def _header(bucket: Bucket) -> bytes:
    """What a safetensors file begins with: names, types and places of its tensors, and the length of that."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for piece, start in zip(bucket.pieces, bucket.starts, strict=True):
        where = [start, start + piece.nbytes]
        entries[piece.name] = {"dtype": DTYPES[piece.dtype], "shape": piece.shape, "data_offsets": where}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory, [bytes] uint8."""
    return tensor.reshape(-1).view(torch.uint8)
