"""What every rank of the tests of sharded checkpoints runs."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import shardedranks
import torch
from builders import learner, parameters, small_config, small_parts
from loadingranks import peak_growth
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.checkpoint import recover, shards
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.export import BackgroundExport, export
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.checkpoint.room import CheckpointSizes
from trainer.errors import RunError
from trainer.files import sha256
from trainer.train.distributed import World, join_world, leave_world, local_part
from trainer.train.learner import Learner
from trainer.weights.buckets import Bucket

# name -> (ranks that share a layer, data parallel ranks of a replica, dtype of the forward passes and of exports)
WORLDS: dict[str, tuple[int, int, torch.dtype]] = {
    "replicas, bfloat16": (1, 2, torch.bfloat16),
    "both ways": (2, 0, torch.float32),
}
SMALL_FILES = 20_000


class Counted:
    """Weights that are nowhere: every tensor is filled with its number."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.numbers = {name: float(number) for number, name in enumerate(shapes, start=1)}

    def read(self, name: str, region: Sequence[slice]) -> Tensor:
        return torch.full([part.stop - part.start for part in region], self.numbers[name])

    def place(self, name: str) -> str:
        return ""

    def close(self) -> None:
        """Nothing is open."""


def large(world: World, width: int) -> tuple[Learner, dict[str, float]]:
    """A model whose ranks hold their own parts alone, and the number that every weight is filled with."""
    config = Qwen2Config(
        vocab_size=8 * width, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        lm: Any = Qwen2ForCausalLM(config)
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config)  # no weight
    weights = Counted({name: tuple(parameter.shape) for name, parameter in lm.named_parameters()})
    return Learner(lm, small_config(), world, 10, weights), weights.numbers


def save(world: World, folder: Path) -> dict[str, Any]:
    """Exports into one file and several, the training waiting or not; a recover checkpoint, and who hashed what."""
    lm = shardedranks.model()
    one = learner(lm, small_config(*shardedranks.SETTINGS), world)
    one.step(shardedranks.batches(lm)[0])
    tokenizer = small_parts().tokenizer
    told: dict[str, Any] = {"parameters": parameters(one), "sizes": CheckpointSizes.of(one)}
    export(one, tokenizer, folder / "one file")
    whole_file, shards.FILE_BYTES = shards.FILE_BYTES, SMALL_FILES
    export(one, tokenizer, folder / "files")

    told["full"] = _told_of_full_disk(one, folder / "full")
    told["full recover"] = _told_of_full_disk_by_recover(one, folder / "no room")
    told["no memory"] = _told_of_no_memory(one, folder / "no memory")
    hashed: list[str] = []
    recover.sha256 = lambda path: hashed.append(path.name) or sha256(path)  # type: ignore[assignment,func-returns-value]
    writer = BackgroundWriter()
    records: list[dict[str, Any]] = []
    exports, store = BackgroundExport(one, tokenizer, writer), RecoverStore(folder / "recover", writer)
    exports.reserve()
    exports.save(folder / "background", records.append)
    store.save_in_background(one, RunState(1, 1, 1, 1, 0.0), {}, world, records.append)
    one.step(shardedranks.batches(lm)[1])
    writer.wait()
    recover.sha256, shards.FILE_BYTES = sha256, whole_file
    return told | {"hashed": hashed, "records": records}


def _told(one: Learner, folder: Path, name: str, instead: Callable[..., Any]) -> str:
    """What this rank raises where the last rank has something else instead of a function of `shards`."""
    real = getattr(shards, name)
    if one.world.rank == one.world.size - 1:
        setattr(shards, name, instead)
    try:
        export(one, small_parts().tokenizer, folder)
    except RunError as error:
        return str(error)
    finally:
        setattr(shards, name, real)
    return ""


def _told_of_full_disk(one: Learner, folder: Path) -> str:
    """All ranks have one disk here, so an error stands in for a full one."""

    def full(bucket: Bucket) -> bytes:
        raise OSError(errno.ENOSPC, f"no room for {bucket.nbytes} bytes")

    return _told(one, folder, "_header", full)


def _told_of_full_disk_by_recover(one: Learner, folder: Path) -> str:
    """As above, of a recover checkpoint: the last rank has no room for its files."""

    class Full(FileSystemWriter):
        def write_data(self, *_: Any) -> Any:
            raise OSError(errno.ENOSPC, "no room")

    if one.world.rank == one.world.size - 1:
        recover.FileSystemWriter = Full  # type: ignore[misc]
    try:
        RecoverStore(folder).save(one, RunState(1, 1, 1, 1, 0.0), {}, one.world)
    except RunError as error:
        return str(error)
    finally:
        recover.FileSystemWriter = FileSystemWriter  # type: ignore[misc]
    return ""


def _told_of_no_memory(one: Learner, folder: Path) -> str:
    """The last rank has no memory for its second tensor; an error stands in."""
    real = shards._prepare

    def none_left(parts: Any, wanted: Any, holders: Any, turn: int, world: World) -> Any:
        if turn == 1:
            raise MemoryError("none is left")
        return real(parts, wanted, holders, turn, world)

    return _told(one, folder, "_prepare", none_left)


def measure(world: World, folder: Path) -> dict[str, Any]:
    """Growth of this rank's peak memory while a model is exported, beside the bytes of the model."""
    one, numbers = large(world, 1024)
    tokenizer = small_parts().tokenizer
    writer = BackgroundWriter()
    exports = BackgroundExport(one, tokenizer, writer)
    export(one, tokenizer, folder / "first")  # buffers of the connections stay

    def in_background() -> BackgroundExport:
        exports.save(folder / "background", lambda _: None)
        writer.wait()
        return exports

    return {
        "weights": sum(4 * p.numel() for p in one.policy.parameters()),
        "largest": max(4 * p.numel() for p in one.policy.parameters()),
        "waiting": peak_growth(lambda: export(one, tokenizer, folder / "waiting")),
        "background": peak_growth(in_background),
        "numbers": numbers,
    }


def main(rank: int, size: int, folder: Path) -> None:
    """Entry point of a rank's process."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for number, (name, (tensor, shard, dtype)) in enumerate(WORLDS.items()):
        meeting = f"file://{folder}/rendezvous{number}"
        world = join_world(rank, size, meeting, dtype=dtype, tensor=tensor, shard=shard)
        found[name] = save(world, folder / name)
        if dtype == torch.float32:
            found["memory"] = measure(world, folder)
        leave_world(world)
    torch.save(found, folder / f"rank{rank}.pt")


def load(rank: int, size: int, folder: Path, tensor: int, slots: Path, shard: int = 0) -> None:
    """What ranks have whose number is not that of the ranks that saved."""
    torch.set_num_threads(1)
    world = join_world(rank, size, f"file://{folder}/rendezvous{size}", tensor=tensor, shard=shard)
    one = learner(shardedranks.model(), small_config(*shardedranks.SETTINGS), world)
    slot, _ = RecoverStore(slots).newest()
    assert slot is not None
    RecoverStore(slots).load(one, slot)
    torch.save(parameters(one), folder / f"rank{rank}.pt")
    leave_world(world)


def save_until_killed(rank: int, size: int, folder: Path, moment: str, tensor: int, shard: int) -> None:
    """Step after step, an export and a recover checkpoint in the background, of weights that are the step's number.

    Until a file of the pattern `moment`, below the folder, is to be synced: there the rank waits to be killed.
    """
    torch.set_num_threads(1)
    sync, shards.FILE_BYTES = os.fsync, SMALL_FILES

    def hold(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().match(moment):
            (folder / "reached").touch()
            threading.Event().wait()
        sync(descriptor)

    os.fsync = hold  # type: ignore[assignment]
    world = join_world(rank, size, f"file://{folder}/rendezvous", tensor=tensor, shard=shard)
    one, _ = large(world, 256)
    writer = BackgroundWriter()
    exports = BackgroundExport(one, small_parts().tokenizer, writer)
    store = RecoverStore(folder / "recover", writer)
    for step in range(1, 1000):
        with torch.no_grad():
            for parameter in one.policy.parameters():
                local_part(parameter).fill_(step)
        exports.save(folder / f"step{step}", lambda _: None)
        store.save_in_background(one, RunState(step, step, step, step, 0.0), {}, world, lambda _: None)


def load_large(rank: int, size: int, folder: Path, slots: Path) -> None:
    """The number that all weights of the newest slot are; they must be one."""
    world = join_world(rank, size, f"file://{folder}/rendezvous{size}")
    one, _ = large(world, 256)
    slot, problems = RecoverStore(slots).newest()
    assert slot is not None
    RecoverStore(slots).load(one, slot)
    values = {float(value) for p in one.policy.parameters() for value in local_part(p).unique()}
    torch.save((slot.state.global_step, values, problems), folder / f"rank{rank}.pt")
    leave_world(world)
