"""Training speed of a model's shape: tokens/s, MFU and peak memory, against this machine's own bfloat16 matmul peak.

    python3 benchmarks/training.py [--shape 135M 1.5B] [--variants compiled eager ...] [--gpus 1 2] [--json FILE]
    python3 benchmarks/training.py --device cpu --shape tiny --tokens 512 --row 128 --seconds 1

The trainer's own optimizer step (forward, backward, clipping, AdamW on float32 master weights) runs on packed rows with
random weights made on the device, loss at 10 % of the positions. Printed for each variant, as it is measured:

* tokens/s and MFU by the formula of trainer/train/flops.py, against the data sheet's peak of the GPU and against the
  best of plain bfloat16 matrix products (8192³) timed in this very process;
* peak memory, seconds of the first step (compilation), and the share of steps with one micro-batch of --tokens and
  with four, over which the optimizer's time is spread;
* with --lora 0 64: the same of adapters of these ranks beside all weights;
* with several numbers of GPUs, or several layouts of allocation_mode (--layouts d1 d4 d4s2 d2t2): tokens/s per GPU
  over those of one GPU of the same run;
* with --keeping: seconds that a checkpoint in the background ($CLUSTERKIT_BENCH_DISK, else /tmp) holds a step up, steps
  beside its writing, and seconds of moving everything to host memory and back (train.offload).

Ranks are processes of this script; nothing else is needed to start them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from shapes import SHAPES, make_learner

from trainer.allocation import AllocationError, Layout
from trainer.allocation_text import parse
from trainer.checkpoint.background import BackgroundWriter
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.config import RunConfig
from trainer.train import varlen
from trainer.train.distributed import World, join_world, leave_world, single_world
from trainer.train.flops import peak_flops
from trainer.train.learner import Learner
from trainer.types import Row

# name -> (compiled, gradient checkpointing)
VARIANTS = {
    "compiled": (True, "none"),
    "compiled, selective": (True, "selective"),
    "compiled, full": (True, "full"),
    "compiled, chunked": (True, "chunked"),
    "compiled, offloaded": (True, "offloaded"),
    "eager": (False, "none"),
    "eager, full": (False, "full"),
    "eager, chunked": (False, "chunked"),
    "eager, offloaded": (False, "offloaded"),
}
LOSS_SHARE = 0.1
ALIKE = ("shape", "variant", "micro_batches", "lora", "layers")


@dataclass(frozen=True)
class Case:
    """One measurement. tokens: of a micro-batch; row: tokens of a conversation, response: of them those with loss.
    place: the training part of an allocation_mode. layers: of the model, 0: as the shape has. lora: rank of the
    adapters that are trained, 0: all weights are.
    """

    shape: str
    variant: str
    tokens: int
    row: int
    micro_batches: int
    seconds: float
    device: str
    place: str = "d1"
    keeping: bool = False
    response: int = 0
    layers: int = 0
    lora: int = 0
    logprob_chunk: int = 4096

    @property
    def layout(self) -> Layout:
        """How ranks share the model. Raises AllocationError."""
        part = parse(f"fsdp:{self.place}").training
        assert part is not None
        return part.layout

    @property
    def gpus(self) -> int:
        """A rank each."""
        return self.layout.gpus


def matmul_peak(device: torch.device, size: int, seconds: float = 1.0) -> float:
    """Best FLOP/s of repeated bfloat16 [size]³ products."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        settle(device)
        began = time.perf_counter()
        for _ in range(10):
            a @ b
        settle(device)
        best = max(best, 10 * 2 * size**3 / (time.perf_counter() - began))
    return best


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_rows(case: Case, vocabulary: int) -> list[Row]:
    """Rows for all micro-batches; the last 10 % of each are trained on, where the case does not say more. GPUs that
    share layers work on the same rows.
    """
    rng = random.Random(1)
    count = case.tokens // case.row * case.micro_batches * case.layout.data
    response = case.response or max(1, int(LOSS_SHARE * case.row))
    rows = []
    for number in range(count):
        ids = rng.choices(range(2, vocabulary), k=case.row)
        logprobs = [-math.log(vocabulary)] * response
        weight = 1.0 / (count * response)
        sign = 1.0 if number % 2 else -1.0
        rows.append(Row(ids[:-response], ids[-response:], logprobs, sign, weight, number))
    return rows


def make_config(case: Case) -> RunConfig:
    compiled, checkpointing = VARIANTS[case.variant]
    return RunConfig.model_validate(
        {
            "model": {"dtype": "bfloat16", "gradient_checkpointing": checkpointing, "lora": {"rank": case.lora}},
            "algorithm": {"clip_low": 1.0, "clip_high": 100.0},  # random weights must not stop the gradient
            "train": {"compile": compiled, "max_tokens_per_mb": case.tokens, "warmup_steps": 0}
            | {"logprob_chunk": case.logprob_chunk},
            "agent": {"template": "words", "chunk_tokens": 16, "max_question_tokens": 4, "max_memory_tokens": 4}
            | {"max_final_tokens": 5},
        }
    )


def measure(case: Case, world: World) -> dict[str, Any]:
    """Steps until the time is up, after two that are not counted (compilation, first allocations)."""
    config = make_config(case)
    learner = make_learner(case.shape, config, world, case.layers)
    shape = learner.policy.lm.config
    rows = make_rows(case, shape.vocab_size)
    began = time.perf_counter()
    learner.step(rows)
    first = time.perf_counter() - began
    learner.step(rows)
    results, end = [], time.perf_counter() + case.seconds
    while not results or world.any(time.perf_counter() < end):
        results.append(learner.step(rows))
    assert all(r.stepped for r in results), "the gradient was not finite"
    best = min(results, key=lambda r: r.work.seconds)
    median = sorted(r.work.seconds for r in results)[len(results) // 2]
    return (keeping(learner, rows, median) if case.keeping else {}) | {
        "shape": case.shape,
        "variant": case.variant,
        "gpus": case.gpus,
        "layout": case.place,
        "layers": shape.num_hidden_layers,
        "lora": case.lora,
        "row": case.row,
        "tokens_per_step": best.work.tokens,
        "micro_batches": best.values["micro_batches"],
        "steps": len(results),
        "step_s": round(median, 4),
        "best_step_s": round(best.work.seconds, 4),
        "first_step_s": round(first, 2),
        "tokens_per_s": round(best.work.tokens / median, 1),
        "flops_per_s_gpu": best.work.flops / median / case.gpus,
        "peak_gib": round(best.work.peak_bytes / 2**30, 2),
        "grad_norm": round(best.values["grad_norm"], 5),
        "loss": round(best.values["actor_loss"], 6),
    }


def keeping(learner: Learner, rows: list[Row], step: float) -> dict[str, Any]:
    """What a checkpoint in the background holds a step up, and what a rest in host memory costs."""
    device = learner.world.device
    writer, records = BackgroundWriter(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="training-", dir=os.environ.get("CLUSTERKIT_BENCH_DISK")) as folder:
        store = RecoverStore(Path(folder), writer)
        store.reserve(learner)  # as a run does it after its first step
        beside = [learner.step(rows).work.seconds for _ in range(3)]
        print(json.dumps({"steps_beside_making_room_s": [round(s, 3) for s in beside]}), flush=True)
        for _ in range(2):  # the first waits for the room, where it is not there yet
            before = len(records)
            store.save_in_background(learner, RunState(1, 1, 1, 1, 0.0), {}, learner.world, records.append)
            print(json.dumps({"checkpoint": "is being written"}), flush=True)
            beside = [learner.step(rows).work.seconds]
            while len(records) == before and not writer.failed:
                beside.append(learner.step(rows).work.seconds)
            writer.wait()
            print(json.dumps({"checkpoint": records[-1], "steps_beside_s": [round(s, 3) for s in beside]}), flush=True)
    record = records[-1]
    seconds: dict[str, list[float]] = {"offload": [], "wake": []}
    for _ in range(3):
        for name, values in seconds.items():
            settle(device)
            began = time.perf_counter()
            getattr(learner, name)()
            settle(device)
            values.append(round(time.perf_counter() - began, 4))
    share = round(record["stall_s"] / step, 4)
    return {"stall_share_of_step": share, "stall_s": record["stall_s"], "beside_s": max(beside), **seconds}


def run_case(case: Case) -> dict[str, Any]:
    """A measurement in processes of its own: each starts with an empty GPU and nothing compiled."""
    with tempfile.TemporaryDirectory(prefix="training-") as folder:
        context = get_context("spawn")
        ranks = [context.Process(target=rank_main, args=(case, rank, folder)) for rank in range(case.gpus)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        result = Path(folder, "result.json")
        if not result.exists():
            fault = Path(folder, "fault")
            return {"error": fault.read_text() if fault.exists() else f"exit codes {[p.exitcode for p in ranks]}"}
        return dict(json.loads(result.read_text()))


def rank_main(case: Case, rank: int, folder: str) -> None:
    world: World | None = None
    try:
        if case.device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // case.gpus))
        if case.gpus == 1:
            world = single_world(dtype=torch.bfloat16)
        else:
            meeting, split = f"file://{folder}/rendezvous", case.layout
            world = join_world(rank, case.gpus, meeting, dtype=torch.bfloat16, tensor=split.tensor, shard=split.shard)
        result = measure(case, world)
        if rank == 0:
            kernel = varlen.flash() if world.device.type == "cuda" else None
            result["attention"] = f"{kernel.name}, grouped {kernel.grouped}" if kernel else "padded blocks"
            Path(folder, "result.json").write_text(json.dumps(result))
    except Exception as error:
        Path(folder, "fault").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        os._exit(1)
    leave_world(world)


def show(result: dict[str, Any], peaks: dict[str, float]) -> None:
    count = f"{result['micro_batches']:.0f} micro-batch(es)"
    name = f"{result['shape']}, {result['variant']}, {result['gpus']} GPU(s) as {result['layout']}, {count}"
    name += f", {result['layers']} layers"
    name += f", adapters of rank {result['lora']}" if result["lora"] else ""
    shares = ", ".join(f"{result['flops_per_s_gpu'] / peak:.1%} of {of}" for of, peak in peaks.items())
    print(
        f"{name}: {result['tokens_per_s']:,.0f} tokens/s, {shares}, {result['step_s']} s a step "
        f"(best {result['best_step_s']}, {result['steps']} steps), peak {result['peak_gib']} GiB, first step "
        f"{result['first_step_s']} s, attention: {result['attention']}, loss {result['loss']}, "
        f"gradient {result['grad_norm']}",
        flush=True,
    )
    if "stall_s" in result:
        names = ("stall_share_of_step", "stall_s", "beside_s", "offload", "wake")
        print(json.dumps({name: result[name] for name in names}), flush=True)


def compare(results: list[dict[str, Any]]) -> None:
    """Add, and print, how the tokens/s of each GPU among several compare with those of one alone."""
    alone = {tuple(r[name] for name in ALIKE): r["tokens_per_s"] for r in results if r["gpus"] == 1}
    for result in results:
        single = alone.get(tuple(result[name] for name in ALIKE))
        if result["gpus"] > 1 and single and "scaling" not in result:
            result["scaling"] = round(result["tokens_per_s"] / result["gpus"] / single, 4)
            print(f"  {result['layout']}: {result['scaling']:.3f} of one GPU's tokens/s each", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["1.5B", "135M"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["compiled", "eager", "eager, full"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], help="numbers of ranks to compare")
    parser.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT", help="in place of --gpus: d4, d4s2, d2t2")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: as many as it has")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a micro-batch")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a conversation")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 4], help="micro-batches of a step")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured time of each variant")
    parser.add_argument("--lora", nargs="+", type=int, default=[0], help="ranks of adapters to compare; 0: all weights")
    parser.add_argument("--keeping", action="store_true", help="also checkpoints in the background, and offloading")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    a = parser.parse_args()
    if a.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU here; for a CPU: --device cpu --shape tiny")
    places = a.layouts or [f"d{number}" for number in a.gpus]
    for place in places:
        try:
            Case("", "", 0, 0, 0, 0.0, "", place).layout  # noqa: B018 (is it one?)
        except AllocationError as error:
            parser.error(f"--layouts: {error}")
    device = torch.device(a.device)
    name = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, rows of {a.row} tokens", flush=True)
    own = matmul_peak(device, 8192 if a.device == "cuda" else 512)
    peaks = {f"this machine's bfloat16 matmul peak ({own / 1e12:.4g} TFLOP/s)": own}
    if a.device == "cuda" and (sheet := peak_flops(device)):
        peaks = {f"the data sheet's {sheet / 1e12:.5g} TFLOP/s (MFU)": sheet, **peaks}
        torch.cuda.empty_cache()
    results: list[dict[str, Any]] = []
    for shape in a.shape:
        for variant in a.variants:
            # Variants with four micro-batches, and several GPUs, only for the first: the others compare one thing.
            for count in a.micro_batches if variant == a.variants[0] else a.micro_batches[:1]:
                for place, rank in itertools.product(places if variant == a.variants[0] else places[:1], a.lora):
                    case = Case(
                        shape, variant, a.tokens, a.row, count, a.seconds, a.device, place, a.keeping, layers=a.layers,
                        lora=rank,
                    )  # fmt: skip
                    result = run_case(case)
                    if "error" in result:
                        print(f"{shape}, {variant}, {place}: {result['error']}", flush=True)
                        continue
                    show(result, peaks)
                    results.append(result)
                    compare(results)
                    if a.json:
                        a.json.write_text(json.dumps({"device": name, "peaks": peaks, "results": results}, indent=1))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
