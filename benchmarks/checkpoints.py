"""What checkpoints cost a training, on ranks of this machine (gloo on CPUs, NCCL where there are as many GPUs).

    .venv/bin/python benchmarks/checkpoints.py [--shape 135M] [--ranks 1 4] [--dtype bfloat16] [--repeat 3]

For every number of ranks it prints, of a persistent checkpoint that the training waits for, of one in the background,
and of a recover checkpoint in the background: seconds that the training is held up, seconds until it is whole (of the
first, which makes room in host memory, and medians of the --repeat after it), and the largest growth of a rank's peak
memory, as bytes and as share of the whole model in float32. Weights are random, files go to $CLUSTERKIT_BENCH_DISK or
/tmp.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.shapes import SHAPES, make_learner
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.export import BackgroundExport, export
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.config import RunConfig
from trainer.train.distributed import join_world, leave_world

Record = dict[str, Any]


def peak_growth(work: Callable[[], Record]) -> Record:
    """A record of some work, with the growth of this process' peak memory (the kernel's count) in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    return work() | {"growth": _resident("VmHWM") - before}


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) << 10


def rank_main(rank: int, folder: Path, a: argparse.Namespace, ranks: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    world = join_world(rank, ranks, f"file://{folder}/rendezvous", dtype=getattr(torch, a.dtype))
    config = RunConfig.model_validate({"model": {"dtype": a.dtype}})
    one = make_learner(a.shape, config, world)
    for parameter in one.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    one.optimizer.step()
    one.optimizer.zero_grad(set_to_none=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    writer, records = BackgroundWriter(), list[Record]()
    exports, store = BackgroundExport(one, tokenizer, writer), RecoverStore(folder / "recover", writer)

    def in_background(save: Callable[[], None]) -> Record:
        world.barrier()
        save()
        writer.wait()
        return records.pop()

    ways: dict[str, Callable[[], Record]] = {
        "persistent, waited for": lambda: export(one, tokenizer, folder / "export"),
        "persistent, background": lambda: in_background(lambda: exports.save(folder / "export", records.append)),
        "recover, background": lambda: in_background(
            lambda: store.save_in_background(one, RunState(1, 1, 1, 1, 0.0), {}, world, records.append)
        ),
    }
    whole = 4 * sum(parameter.numel() for parameter in one.policy.parameters())
    for name, way in ways.items():
        found = [peak_growth(way) for _ in range(a.repeat + 1)]
        growth = max(world.gather(max(record["growth"] for record in found)))
        stalls, seconds = ([record[key] for record in found] for key in ("stall_s", "seconds"))
        told = {
            "ranks": ranks, "what": name, "bytes": found[0]["bytes"], "first_stall_s": round(stalls[0], 3),
            "first_seconds": round(seconds[0], 3), "stall_s": round(median(stalls[1:]), 3),
            "seconds": round(median(seconds[1:]), 3), "growth_of_a_rank": growth, "of_model": round(growth / whole, 3),
        }  # fmt: skip
        if world.is_main:
            print(json.dumps(told), flush=True)
    leave_world(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135M")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=3)
    a = parser.parse_args()
    if min(*a.ranks, a.repeat) < 1:
        parser.error("--ranks and --repeat want numbers of at least 1")
    context = get_context("spawn")
    for ranks in a.ranks:
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=os.environ.get("CLUSTERKIT_BENCH_DISK")) as folder:
            processes = [context.Process(target=rank_main, args=(n, Path(folder), a, ranks)) for n in range(ranks)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
