"""What every rank of the loading tests runs: models from folders onto meshes of all kinds, and what that took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from builders import parameters, sampled_rows, small_config, whole
from torch import Tensor

from trainer.config import RunConfig
from trainer.train.distributed import World, join_world, leave_world
from trainer.train.learner import Learner
from trainer.train.loading import Origin, open_checkpoint
from trainer.train.model import load_lm

# name -> (ranks that share a layer, dtype of the forward passes)
WORLDS: dict[str, tuple[int, torch.dtype]] = {
    "data parallel": (1, torch.float32),
    "data parallel, bfloat16": (1, torch.bfloat16),
    "tensor parallel": (2, torch.float32),
}
BOTH = {"both": (2, torch.float32)}


def config_of(dtype: torch.dtype) -> RunConfig:
    name = str(dtype).removeprefix("torch.")
    return small_config(f"model.dtype={name}", "algorithm.kl_coef=0.1", "train.eps=1.0", "train.learning_rate=0.1")


def shards(learner: Learner) -> dict[str, tuple[str, Tensor]]:
    """Placements and this rank's own part of every parameter."""
    found = {}
    for name, parameter in learner.policy.lm.named_parameters():
        sharded: Any = parameter
        found[name] = (str(sharded.placements), sharded.to_local().detach().clone())
    return found


def buffers(lm: Any) -> dict[str, Tensor]:
    return {name: whole(tensor) for name, tensor in lm.named_buffers()}


def load(world: World, folder: Path) -> dict[str, Any]:
    """The model from its files in parts, beside the same one that was loaded whole and shared out then."""
    config = config_of(world.dtype)
    rows = sampled_rows(load_lm(folder, config.model, torch.float32), 5, 64, seed=1)
    for row in rows:
        row.ref_logprobs = list(row.behave_logprobs)
    expected = Learner(load_lm(folder, config.model, torch.float32), config, world, 10)
    origin = Origin(folder, config, world)
    assert all(p.is_meta for p in origin.lm.parameters())
    replica, reference = origin.replica(), origin.reference()
    found = Learner(origin.lm, config, world, 10, origin.weights)
    told = {
        "same shards": _same(shards(found), shards(expected)),
        "parameters": parameters(found),
        "buffers": buffers(found.policy),
        "replica": {n: p.detach().clone() for n, p in replica.named_parameters()},
        "replica buffers": buffers(replica),
        "reference": {n: whole(p) for n, p in reference.lm.named_parameters()},
        "reference logprobs": found.logprobs(rows, reference),
        "logprobs": found.logprobs(rows),
        "tied": found.policy.lm.lm_head.weight is found.policy.lm.model.embed_tokens.weight,
    }
    told["stats"] = [one.step(rows).values for one in (found, expected)]
    told["moved"] = parameters(found)
    told["moved whole"] = parameters(expected)
    return told


def _same(a: dict[str, tuple[str, Tensor]], b: dict[str, tuple[str, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(a[n][0] == b[n][0] and torch.equal(a[n][1], b[n][1]) for n in a)


def peak_growth(work: Callable[[], object]) -> int:
    """Bytes by which the peak of this process' memory (the kernel's count) exceeds what it had before some work."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    kept = work()
    grown = _resident("VmHWM") - before
    del kept
    return grown


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10


def measure(world: World, folder: Path) -> dict[str, int]:
    """Peaks of loading in parts and, for comparison, whole; beside the bytes of all weights in float32."""
    config = small_config()

    def in_parts() -> Learner:
        lm, weights = open_checkpoint(folder, config.model)
        return Learner(lm, config, world, 10, weights)

    return {
        "weights": sum(4 * p.numel() for p in open_checkpoint(folder, config.model)[0].parameters()),
        "in parts": peak_growth(in_parts),
        "whole": peak_growth(lambda: load_lm(folder, config.model, torch.float32)),
    }


def main(rank: int, size: int, folder: Path, models: list[Path], large: Path | None) -> None:
    """Entry point of a rank's process. Two ranks: meshes of all kinds; four: one that is shared out both ways."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for number, (name, (tensor, dtype)) in enumerate((WORLDS if size == 2 else BOTH).items()):
        world = join_world(rank, size, f"file://{folder}/rendezvous{number}", dtype=dtype, tensor=tensor)
        if large is not None and name == "data parallel":
            found["memory"] = measure(world, large)
        for model in models:
            found[f"{model.name}: {name}"] = load(world, model)
        leave_world(world)
    torch.save(found, folder / f"rank{rank}.pt")
