"""Training on the memory workload with and without shared prefixes: tokens/s of the rows, MFU, memory, exactness.

    python3 benchmarks/prefixes.py [--shape 1.5B] [--workload documents] [--documents 4] [--seconds 8] [--json FILE]
    python3 benchmarks/prefixes.py --shape 7B --layers 6 --workload memagent --documents 1
    python3 benchmarks/prefixes.py --ranks 1 2 4
    python3 benchmarks/prefixes.py --plan 82e6
    python3 benchmarks/prefixes.py --device cpu --shape tiny --scale 0.02 --documents 2 --seconds 1

The trainer's own optimizer steps on random weights of a shape. Rows are those of a step in which every trajectory
reads its document section by section and answers: `documents` has four sections of 2,000 tokens, 8 trajectories and
memories of 256 tokens; `memagent` is the paper's 7B set-up (arXiv 2507.02259), sections of 5,000, 16 trajectories,
memories of 1,024. Both orders of the prompt, each with `train.share_prefixes` on and off, in one process, a JSON object
a line; last the ratios of rows learned from per second, on over off. With --ranks the same over that many GPUs (FSDP2,
--documents for each of them), and how much of one GPU's gain they keep. With --exact first how far gradients and
log-probs are from those of whole rows: with shared prefixes, in another packing, and computed once more. `flash4` says
whether FlashAttention 4 takes part where prefixes are shared.

--plan: what finding prefixes and planning micro-batches costs for a step of so many tokens (`memagent` rows, 128
ranks), over the time that its FLOPs take 128 GPUs at 45 % of the data sheet's peak of an H200, and what the rank with
most computes over what each would if groups could be divided for nothing. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from shapes import SHAPES, make_learner, make_lm
from training import matmul_peak, settle

from trainer.config import RunConfig
from trainer.train import varlen
from trainer.train.distributed import World, join_world, leave_world, single_world
from trainer.train.flops import ModelFlops, peak_flops, peak_of
from trainer.train.learner import Learner
from trainer.train.microbatches import distinct_tokens, share_out
from trainer.train.prefixes import prefix_groups
from trainer.types import Row

RANKS = 128
MFU = 0.45


@dataclass(frozen=True)
class Workload:
    """Tokens of the parts of a prompt, and how many sections and trajectories a document has."""

    section: int
    memory: int
    sections: int
    group: int
    instructions: int = 120
    problem: int = 30

    def scaled(self, factor: float) -> Workload:
        sizes = (max(1, int(factor * size)) for size in (self.section, self.memory))
        return Workload(*sizes, self.sections, self.group, self.instructions, self.problem)


WORKLOADS = {"documents": Workload(2000, 256, 4, 8), "memagent": Workload(5000, 1024, 4, 16)}


def make_rows(work: Workload, documents: int, order: str, vocabulary: int, pool: list[int] | None = None) -> list[Row]:
    """A row for every update and every answer, trained on whole responses. pool: token ids, so that they are one
    object each.
    """
    rng = random.Random(0)
    tokens = pool or list(range(2, vocabulary))

    def ids(count: int) -> list[int]:
        return rng.choices(tokens, k=count)

    instructions = ids(work.instructions)
    rows = []
    for document in range(documents):
        problem = ids(work.problem)
        sections = [ids(work.section) for _ in range(work.sections)]
        for sample in range(work.group):
            memory = ids(8)  # "no memory yet" differs from nothing else
            advantage = 1.0 if sample % 2 else -1.0
            for turn in range(work.sections + 1):
                section = sections[turn] if turn < work.sections else []
                seen = memory if turn else instructions[:8]
                parts = (seen, section) if order == "paper" else (section, seen)
                memory = ids(work.memory)
                prompt = [*instructions, *problem, *parts[0], *parts[1], *instructions[-10:]]
                rows.append(Row(prompt, memory, [-11.0] * work.memory, advantage, 1.0, document * work.group + sample))
    total = sum(len(row.response_ids) for row in rows)
    for row in rows:
        row.weight = 1.0 / total
    return rows


def config(share: bool, tokens: int, compiled: bool, checkpointing: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"dtype": "bfloat16", "gradient_checkpointing": checkpointing},
            "algorithm": {"clip_low": 1.0, "clip_high": 1e6},  # random weights must not stop the gradient
            "train": {"compile": compiled, "max_tokens_per_mb": tokens, "warmup_steps": 0, "share_prefixes": share},
            "agent": {"template": "words", "chunk_tokens": 16, "max_question_tokens": 4, "max_memory_tokens": 4}
            | {"max_final_tokens": 5},
        }
    )


def measure(learner: Learner, rows: list[Row], seconds: float, peaks: dict[str, float]) -> dict[str, Any]:
    """Steps until the time is up, after one that is not counted (compilation, first allocations)."""
    began = time.perf_counter()
    learner.step(rows)
    first = time.perf_counter() - began
    results, end = [], time.perf_counter() + seconds
    while not results or learner.world.any(time.perf_counter() < end):
        results.append(learner.step(rows))
    assert all(result.stepped for result in results), "the gradient was not finite"
    settle(learner.world.device)
    work = sorted((result.work for result in results), key=lambda work: work.seconds)[len(results) // 2]
    rate = work.flops / work.seconds / learner.world.size
    return {
        "steps": len(results),
        "step_s": round(work.seconds, 4),
        "first_step_s": round(first, 1),
        "row_tokens": work.row_tokens,
        "computed_tokens": work.tokens,
        "micro_batches": results[0].values["micro_batches"],
        "row_tokens_per_s": round(work.row_tokens / work.seconds),
        **{f"flops_of_{name}": round(rate / peak, 4) for name, peak in peaks.items()},
        "peak_gib": round(work.peak_bytes / 2**30, 2),
        "grad_norm": results[0].values["grad_norm"],
    }


def gradients(learner: Learner, rows: list[Row]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def keep(*_: Any) -> None:
        for parameter in learner.policy.parameters():
            grad = parameter.grad
            assert grad is not None
            seen.append((grad.to_local() if hasattr(grad, "to_local") else grad).detach().clone())

    handle = learner.optimizer.register_step_pre_hook(keep)
    for group in learner.optimizer.param_groups:
        group["weight_decay"] = 0.0
    rate, learner.config.train.learning_rate = learner.config.train.learning_rate, 1e-30  # the weights stay
    learner.step(rows)
    learner.config.train.learning_rate = rate
    handle.remove()
    return seen


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """‖one - other‖ / ‖other‖ over all parameters."""
    difference = sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in other)) ** 0.5


def exactness(learner: Learner, rows: list[Row], tokens: int) -> dict[str, Any]:
    """How far gradients, and log-probs in the mean, are apart. The weights stay as they are."""
    settings = learner.config.train
    kept, found, logprobs = settings.max_tokens_per_mb, {}, {}
    cases = (("whole", False, tokens), ("again", False, tokens), ("repacked", False, tokens // 2))
    for name, share, budget in (*cases, ("shared", True, tokens)):
        settings.share_prefixes, settings.max_tokens_per_mb = share, budget
        found[name] = gradients(learner, rows)
        logprobs[name] = torch.tensor([value for row in learner.logprobs(rows) for value in row])
    settings.max_tokens_per_mb = kept
    return {
        "gradients_from_whole": {name: apart(found[name], found["whole"]) for name in found if name != "whole"},
        "logprobs_from_whole": {
            name: float((logprobs[name] - logprobs["whole"]).abs().mean()) for name in found if name != "whole"
        },
    }


def plan(tokens: float, sections: int, memory: int) -> dict[str, Any]:
    """Seconds for the rows of one step, by part."""
    work = replace(WORKLOADS["memagent"], sections=sections, memory=memory)
    pool = list(range(2, 152064))
    per_document = sum(row.num_tokens for row in make_rows(work, 1, "section_first", 152064, pool))
    documents = round(tokens / per_document)
    rows = make_rows(work, documents, "section_first", 152064, pool)
    total, lengths = sum(row.num_tokens for row in rows), [row.num_tokens for row in rows]
    timings = {}
    began = time.perf_counter()
    for row in rows:
        row.ids  # noqa: B018 (made once, on first use)
    timings["arrays_s"] = time.perf_counter() - began
    began = time.perf_counter()
    groups = prefix_groups(rows)
    timings["find_s"] = time.perf_counter() - began
    began = time.perf_counter()
    plans = share_out(groups, lengths, RANKS, 32768)
    timings["plan_s"] = time.perf_counter() - began
    with torch.device("meta"):
        flops = ModelFlops.of(make_lm("7B", torch.device("meta")))
    computed = sum(group.prefix + sum(lengths[same[0]] - group.prefix for same in group.rows) for group in groups)
    loads = distinct_tokens(plans, groups, lengths)
    sampled = sum(len(row.response_ids) for row in rows)
    peak = peak_of("H200")
    assert peak is not None
    spans = [(0, group.prefix) for group in groups]
    spans += [(group.prefix, lengths[same[0]]) for group in groups for same in group.rows]
    step = flops.training(computed, sampled, flops.squares(spans)) / (RANKS * peak * MFU)
    parts = sum(timings.values())
    return {
        "row_tokens": total,
        "rows": len(rows),
        "computed_tokens": computed,
        "micro_batches": len(plans[0]),
        "busiest_rank_over_even": round(max(loads) / (computed / RANKS), 3),
        **{name: round(value, 3) for name, value in timings.items()},
        "training_s_of_128_gpus": round(step, 2),
        "share_of_training": round(parts / step, 5),
        "share_without_arrays": round((parts - timings["arrays_s"]) / step, 5),
    }


def compare(world: World, a: argparse.Namespace, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """Each order with shared prefixes and without, on these ranks; printed by the first as it is measured."""
    compiled = not a.eager and world.device.type == "cuda"
    learner = make_learner(a.shape, config(True, a.tokens, compiled, a.checkpointing), world, a.layers)
    work, vocabulary = WORKLOADS[a.workload].scaled(a.scale), learner.policy.lm.config.vocab_size
    results: list[dict[str, Any]] = []

    def tell(**found: Any) -> None:
        results.append({"ranks": world.size, **found})
        if world.is_main:
            print(json.dumps(results[-1]), flush=True)

    rows_of = {order: make_rows(work, a.documents * world.size, order, vocabulary) for order in a.orders}
    if a.exact:  # before the weights move: as they learn from noise a few tokens come to outweigh the others
        for order, rows in rows_of.items():
            found = exactness(learner, rows, a.tokens)
            tell(prompt_order=order, flash4=varlen.has_faster(), **found)
    for order, rows in rows_of.items():
        speeds = {}
        for share in (True, False):
            learner.config.train.share_prefixes = share
            found = measure(learner, rows, a.seconds, peaks)
            speeds[share] = found["row_tokens_per_s"]
            tell(workload=a.workload, prompt_order=order, share_prefixes=share, flash4=varlen.has_faster(), **found)
        tell(prompt_order=order, on_over_off=round(speeds[True] / speeds[False], 3))
    return results


def rank_main(rank: int, ranks: int, folder: Path, a: argparse.Namespace, peaks: dict[str, float]) -> None:
    """One of several ranks."""
    if a.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if ranks == 1:
        world = single_world(dtype=torch.bfloat16)
    else:
        world = join_world(rank, ranks, f"file://{folder}/rendezvous", dtype=torch.bfloat16)
    results = compare(world, a, peaks)
    if world.is_main:
        (folder / "results.json").write_text(json.dumps(results))
    leave_world(world)


def on_ranks(ranks: int, a: argparse.Namespace, peaks: dict[str, float]) -> list[dict[str, Any]]:
    """`compare` on ranks in processes of their own, so that each number of them finds empty GPUs."""
    with tempfile.TemporaryDirectory(prefix="prefixes-") as folder:
        context = get_context("spawn")
        processes = [context.Process(target=rank_main, args=(n, ranks, Path(folder), a, peaks)) for n in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{ranks} ranks ended with codes {[process.exitcode for process in processes]}")
        found: list[dict[str, Any]] = json.loads(Path(folder, "results.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--layers", type=int, default=0, help="as many layers as this in place of the shape's")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1], help="numbers of GPUs to compare; one first")
    parser.add_argument("--workload", choices=WORKLOADS, default="documents")
    parser.add_argument("--documents", type=int, default=4, help="documents of a step, for each rank")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--orders", nargs="+", choices=("paper", "section_first"), default=["section_first", "paper"])
    parser.add_argument("--checkpointing", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time of each case")
    parser.add_argument("--exact", action="store_true", help="first how far gradients and log-probs are apart")
    parser.add_argument("--plan", type=float, metavar="TOKENS", help="only what planning a step costs")
    parser.add_argument("--sections", type=int, default=4, help="of a document of --plan")
    parser.add_argument("--plan-memory", type=int, default=1024, help="tokens of a memory of --plan")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    a = parser.parse_args()
    if a.plan:
        print(json.dumps(plan(a.plan, a.sections, a.plan_memory)), flush=True)
        return
    if a.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; for a CPU: --device cpu --shape tiny")
    device = torch.device(a.device)
    peaks = {"matmul": matmul_peak(device, 8192 if a.device == "cuda" else 512)}
    if a.device == "cuda" and (sheet := peak_flops(device)):
        peaks["data_sheet"] = sheet
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    results: list[dict[str, Any]] = [{"device": name, "torch": torch.__version__, "peaks": peaks, "shape": a.shape}]
    print(json.dumps(results[0]), flush=True)
    gains: dict[str, float] = {}
    for ranks in a.ranks:
        found = on_ranks(ranks, a, peaks)
        for one in [one for one in found if "on_over_off" in one]:
            alone = gains.setdefault(one["prompt_order"], one["on_over_off"])
            if ranks > a.ranks[0]:
                kept = {"prompt_order": one["prompt_order"], "gain_kept": round(one["on_over_off"] / alone, 3)}
                found.append({"ranks": ranks, "of_ranks": a.ranks[0], **kept})
                print(json.dumps(found[-1]), flush=True)
        results += found
    if a.json:
        a.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
