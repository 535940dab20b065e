"""What ranks run whose layers are sharded in every way: FSDP, replicas, tensor parallel, float32 and bfloat16."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import group_rows, learner, parameters, sampled_rows, sharpen, small_config
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.export import parameter_digest
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.errors import UserError
from trainer.train import attention, chunks
from trainer.train.distributed import World, join_world, leave_world, local_part
from trainer.train.learner import Learner
from trainer.train.parity import require_parity
from trainer.types import Row
from trainer.weights.source import WeightSource

# With a large epsilon AdamW's step is nearly linear in the gradient: a wrong scale shows, rounding is not blown up.
SETTINGS = (
    "train.eps=1.0", "train.learning_rate=0.1", "train.weight_decay=0.1", "train.grad_clip=0.5",
    "train.max_tokens_per_mb=64",
)  # fmt: skip

# name -> (ranks that share a layer, data parallel ranks of a replica, 0 for all, dtype of the forward passes)
WORLDS: dict[str, tuple[int, int, torch.dtype]] = {
    "tensor parallel": (2, 0, torch.float32),
    "data parallel, bfloat16": (1, 0, torch.bfloat16),
    "whole replicas": (1, 1, torch.float32),
}
# By number of ranks: replica x data (x tensor), each of two.
REPLICAS = {4: (1, 2, torch.float32), 8: (2, 2, torch.float32)}


@torch.no_grad()
def model() -> Any:
    """A Qwen3: four query and two key/value heads, norms of its own for both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        lm = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=97,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=256,
                initializer_range=0.1,
                tie_word_embeddings=True,
                attn_implementation=attention.IMPLEMENTATION,
            )
        )
        for name, parameter in lm.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return sharpen(lm, 2.0)


def batches(lm: Any) -> list[list[Row]]:
    """The second one has groups of rows that begin alike, and rows of their own."""
    first, last = (sampled_rows(lm, count, lm.config.vocab_size, seed=count) for count in (9, 7))
    groups = [(40, [(3, 5), (9, 2), (1, 8)]), (24, [(5, 5), (1, 7)]), (11, [(6, 6)])]
    return [first, group_rows(lm, groups, 6), last]


def run(world: World, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint in the background, and a third step while it is written."""
    lm = model()
    rows = batches(lm)
    # One rank alone computes layers whole, those that share them by pieces (`main`).
    settings = (*SETTINGS, *(("model.gradient_checkpointing=chunked",) if world.size > 1 else ()))
    if world.tensor_size > 1:
        with pytest.raises(UserError, match="computed again: set"):
            learner(lm, small_config(*SETTINGS, "train.compile=true", "model.gradient_checkpointing=full"), world)
    one = learner(lm, small_config(*settings), world)
    one._sync_once = world.replicas == 1  # else as on a GPU that has no room for whole gradients
    seen = watch_tokens(one)
    writer, records = BackgroundWriter(), list[dict[str, Any]]()
    store = RecoverStore(folder, writer)
    parity = require_parity(one, 80, lm.config.vocab_size)  # and the steps stay those of one rank
    stats = [one.step(rows[0]).values]
    store.reserve(one)
    one.host.put_state(one.optimizer)
    one.host.put_weights(one.policy)  # the next step fetches both
    stats.append(one.step(rows[1]).values)
    store.save_in_background(one, RunState(2, 2, 2, 2, 0.0), {}, world, records.append)
    stats.append(one.step(rows[2]).values)
    lengths = [len(values) for values in one.logprobs(rows[0])]
    writer.wait()
    assert [record["global_step"] for record in records] == [2]
    again = learner(lm, small_config(*settings), world)
    slot, _ = RecoverStore(folder).newest()
    assert slot is not None
    RecoverStore(folder).load(again, slot)
    again.step(rows[2])
    found = {"resumed": parameters(again), "stats": stats, "parameters": parameters(one), "lengths": lengths}
    own = {name: local_part(parameter).detach() for name, parameter in one.policy.named_parameters()}
    found |= {"parity": parity, "own": own, "digest": parameter_digest(one), "tokens": seen}
    return found | {"served": served_by_rank_0(one)}


def served_by_rank_0(one: Learner) -> dict[str, Tensor]:
    """What rank 0 would give to servers; nothing on the others."""
    source = WeightSource(one, 30_000, torch.float32)
    flat = source.buffer() if one.world.is_main else None
    found = {}
    source.open()
    for bucket in source.buckets:
        source.fill(bucket, flat)
        if flat is not None:
            found |= {p.name: v.clone() for p, v in zip(bucket.pieces, bucket.views(flat), strict=True)}
    source.close()
    return found


def watch_tokens(one: Learner) -> list[tuple[int, int]]:
    """Tokens of each micro-batch, and those of them that a rank has between the layers; filled as it computes."""
    seen: list[tuple[int, int]] = []
    model = one.policy.lm.model
    whole: list[int] = []
    model.embed_tokens.register_forward_hook(lambda _, ids, __: whole.append(ids[0].shape[1]))
    model.layers[1].register_forward_pre_hook(lambda _, hidden: seen.append((whole[-1], hidden[0].shape[1])))
    return seen


def main(rank: int, size: int, folder: Path) -> None:
    """Entry point of a rank's process."""
    torch.set_num_threads(1)
    chunks.CHUNK = 16
    found = {}
    worlds = WORLDS if size == 2 else {"replicas": REPLICAS[size]}
    for number, (name, (tensor, shard, dtype)) in enumerate(worlds.items()):
        meeting = f"file://{folder}/rendezvous{number}"
        world = join_world(rank, size, meeting, dtype=dtype, tensor=tensor, shard=shard)
        found[name] = run(dataclasses.replace(world), folder / name)
        leave_world(world)
    torch.save(found, folder / f"rank{rank}.pt")
