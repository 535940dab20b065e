"""What every rank of the tests of adapters runs: steps, a checkpoint, weights for servers, the replica that samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from builders import parameters, sampled_rows, small_config
from torch import Tensor

from trainer.checkpoint.export import export
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.config import RunConfig
from trainer.train import chunks
from trainer.train.distributed import World, join_world, leave_world, single_world
from trainer.train.learner import Learner
from trainer.train.loading import Origin
from trainer.train.logprobs import PolicyModel
from trainer.train.lora import BasePolicy, add_adapters, base_digest, is_adapter
from trainer.train.model import load_lm, load_tokenizer
from trainer.train.parity import require_parity
from trainer.types import Row
from trainer.weights.source import WeightSource, refresh

# name -> (ranks that share a layer, data parallel ranks of a replica, 0 for all, dtype of the forward passes)
WORLDS: dict[str, tuple[int, int, torch.dtype]] = {
    "data parallel, bfloat16": (1, 0, torch.bfloat16),
    "tensor parallel": (2, 0, torch.float32),
}
FOUR = {"both": (2, 0, torch.float32), "replicas": (1, 2, torch.float32)}
# With a large epsilon AdamW's step is nearly linear in the gradient: a wrong scale shows, rounding is not blown up.
SETTINGS = (
    "model.lora.rank=3", "model.lora.alpha=6", "train.eps=1.0", "train.learning_rate=1.0", "train.grad_clip=0.5",
    "train.weight_decay=0.1", "train.max_tokens_per_mb=64",
)  # fmt: skip


def config_of(dtype: torch.dtype, ranks: int = 1) -> RunConfig:
    """Four ranks compute the feed-forward parts of layers by pieces (`main`), others whole."""
    kept = "chunked" if ranks == 4 else "none"
    name = str(dtype).removeprefix("torch.")
    return small_config(*SETTINGS, f"model.dtype={name}", f"model.gradient_checkpointing={kept}")


def batches(folder: Path) -> list[list[Row]]:
    lm = load_lm(folder, small_config().model, torch.float32)
    return [sampled_rows(lm, count, lm.config.vocab_size, seed=count) for count in (9, 6)]


def make(world: World, folder: Path) -> tuple[Origin, Learner]:
    origin = Origin(folder, config_of(world.dtype, world.size), world)
    return origin, Learner(origin.lm, origin.config, world, 10, origin.weights)


def whole_digest(folder: Path, dtype: torch.dtype) -> str:
    """Digest of the base that is not shared out."""
    lm = add_adapters(load_lm(folder, small_config().model, torch.float32), config_of(dtype).model.lora, dtype, 1)
    return base_digest(PolicyModel(lm), single_world())


def adapters(one: Learner) -> dict[str, Tensor]:
    return {name: value for name, value in parameters(one).items() if is_adapter(name)}


def served(one: Learner) -> dict[str, Tensor]:
    """What servers would be given, on every rank."""
    source = WeightSource(one, 30_000, torch.float32, everywhere=True)
    found = {}
    flat = source.buffer()
    source.open()
    for bucket in source.buckets:
        source.fill(bucket, flat)
        for piece, view in zip(bucket.pieces, bucket.views(flat), strict=True):
            found[piece.name] = view.clone()
    source.close()
    return found


def run(world: World, folder: Path, model: Path) -> dict[str, Any]:
    """Two steps with adapters on the model of a folder; the first is saved and gone on from by another learner."""
    rows = batches(model)
    origin = Origin(model, config_of(world.dtype, world.size), world)
    replica = origin.replica()
    one = Learner(origin.lm, origin.config, world, 10, origin.weights)
    told: dict[str, Any] = {"digest": one.base, "first": parameters(one), "parity": require_parity(one, 80, 64).gap}
    told["before"] = one.logprobs(rows[0])
    stats = [one.step(rows[0]).values]
    told["reference"] = one.logprobs(rows[0], BasePolicy(one.policy))
    store = RecoverStore(folder / "recover")
    told["saved"] = store.save(one, RunState(1, 1, 1, 1, 0.0), {}, world)
    stats.append(one.step(rows[1]).values)
    told |= {"stats": stats, "after": one.logprobs(rows[0]), "adapters": adapters(one), "served": served(one)}
    told["base"] = {name: value for name, value in parameters(one).items() if not is_adapter(name)}
    refresh(replica, one.policy, world)
    told["replica"] = {name: p.detach().clone() for name, p in replica.named_parameters()}
    export(one, load_tokenizer(model), folder / "export")
    again = make(world, model)[1]
    slot, _ = RecoverStore(folder / "recover").newest()
    assert slot is not None
    RecoverStore(folder / "recover").load(again, slot)
    again.step(rows[1])
    return told | {"resumed": adapters(again)}


def main(rank: int, size: int, folder: Path, model: Path) -> None:
    """Entry point of a rank's process. Two ranks: meshes of two kinds; four: two kinds that are shared out twice."""
    torch.set_num_threads(1)
    chunks.CHUNK = 16
    found: dict[str, Any] = {}
    for number, (name, (tensor, shard, dtype)) in enumerate((WORLDS if size == 2 else FOUR).items()):
        meeting = f"file://{folder}/rendezvous{number}"
        world = join_world(rank, size, meeting, dtype=dtype, tensor=tensor, shard=shard)
        found[name] = run(world, folder / name, model)
        leave_world(world)
    torch.save(found, folder / f"rank{rank}.pt")
