"""Tokens/s of the embedded engine and of the trainer on this machine, against its measured matmul peak.

    .venv/bin/python benchmarks/embedded.py [--preset tiny] [--steps 5] [--threads N] [--sharing off on] [--json]
        [key=value ...]

Runs the rollout and the optimizer step of the tiny preset on freshly initialised weights (speed does not depend on
what a model has learned; responses then mostly run to their limit, which is the worst case) and prints

* the machine's float32 matmul peak, measured in this process with the same number of threads, on a square product and
  on the shape that the model's own layers have;
* rollout and training in tokens/s and as a share of that peak, from the model FLOPs of the tokens that had to be
  computed: forward = 2·P_body·T + 2·P_head·T_logits + 2·layers·width·Σ len² (causal attention), training three times
  that; identical prompts of a batch count once;
* where the rest of a step goes;
* with `--sharing off on`, both with what prompts of a group begin with computed for each of them and once
  (`rollout.share_prefixes`, `train.share_prefixes`), and the ratio of the two steps' times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from clusterkit.config.resolve import resolve
from trainer.agents.memagent import MemAgent
from trainer.config import RunConfig
from trainer.engines import embedded
from trainer.engines.embedded import EmbeddedEngine
from trainer.rollout.batch import make_batch
from trainer.rollout.controller import RolloutController, SamplingPlan
from trainer.tasks import make_source
from trainer.tasks.recall import Recall
from trainer.train import learner as learner_module
from trainer.train.distributed import single_world
from trainer.train.learner import Learner
from trainer.train.model import stop_token_ids
from trainer.types import Row
from trainer.warmup import tiny

SECONDS: dict[str, float] = defaultdict(float)


@contextmanager
def timed(name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        SECONDS[name] += time.perf_counter() - began


def watch(owner: Any, attribute: str, name: str) -> None:
    """Time every call of a function or method, under `name`."""
    original = getattr(owner, attribute)
    original = getattr(original, "watched", original)  # a second measurement must not count a first one's calls twice

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with timed(name):
            return original(*args, **kwargs)

    wrapped.watched = original  # type: ignore[attr-defined]
    setattr(owner, attribute, wrapped)


def matmul_peak(rows: int, inner: int, columns: int, seconds: float = 1.0) -> float:
    """Best FLOP/s of repeated [rows, inner] x [inner, columns] float32 products."""
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(4):
            a @ b
        best = max(best, 4 * 2 * rows * inner * columns / (time.perf_counter() - began))
    return best


class Flops:
    """Model FLOPs from token counts; see the module's docstring."""

    def __init__(self, lm: Any) -> None:
        self.head = lm.lm_head.weight.numel()
        self.body = sum(p.numel() for name, p in lm.named_parameters() if p.ndim == 2 and "embed" not in name)
        if not lm.config.tie_word_embeddings:
            self.body -= self.head
        self.attention = 2 * lm.config.num_hidden_layers * lm.config.hidden_size

    def forward(self, tokens: int, logits: int, squares: int) -> float:
        return 2.0 * self.body * tokens + 2.0 * self.head * logits + self.attention * squares


def rollout_flops(flops: Flops, rows: list[Row]) -> float:
    """Every distinct prompt once, then every sampled token but the last of a response (it is never an input)."""
    prompts = {tuple(row.prompt_ids) for row in rows}
    tokens = sum(map(len, prompts))
    total = flops.forward(tokens, len(prompts), sum(len(p) ** 2 for p in prompts))
    for row in rows:
        new = len(row.response_ids) - 1
        total += flops.forward(new, new, 2 * new * len(row.prompt_ids) + new**2)
    return total


def training_flops(flops: Flops, rows: list[Row]) -> float:
    tokens = sum(row.num_tokens for row in rows)
    loss_tokens = sum(len(row.response_ids) for row in rows)
    return 3 * flops.forward(tokens, loss_tokens, sum(row.num_tokens**2 for row in rows))


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    source = make_source(config)
    assert isinstance(source, Recall), "this benchmark is for task=recall"
    tokenizer = tiny.make_tokenizer(source.vocabulary())
    lm = tiny.make_lm(config.model, tokenizer, seed=1)
    flops = Flops(lm)
    agent = MemAgent(config.agent, tokenizer)
    engine = EmbeddedEngine(
        lm,
        stop_token_ids(lm, tokenizer),
        config.rollout.max_batch_tokens,
        share_prefixes=config.rollout.share_prefixes,
    )
    controller = RolloutController(agent, engine, seed=1)
    learner = Learner(lm, config, single_world(), 1000)
    watch(engine, "_prefill", "rollout: prefill")
    watch(engine, "_generate_block", "rollout: generate")
    watch(embedded._Sampler, "draw", "rollout: sampling")
    watch(learner_module, "pack", "training: packing")
    watch(learner, "_loss", "training: forward")
    watch(torch.Tensor, "backward", "training: backward")
    watch(learner.optimizer, "step", "training: optimizer")
    totals: dict[str, float] = defaultdict(float)
    for step in range(steps + 1):
        if step == 1:  # the first one warms up caches and is not counted
            SECONDS.clear()
            totals.clear()
        began = time.perf_counter()
        with timed("rollout"):
            tasks = [source.train(step * config.rollout.batch_size + i) for i in range(config.rollout.batch_size)]
            groups = controller.run(tasks, SamplingPlan(f"bench-{step}", config.rollout.group_size))
        with timed("rows"):
            batch = make_batch(groups, config, step)
        rows = [row for minibatch in batch.minibatches for row in minibatch]
        for number, row in enumerate(rows):
            row.advantage = 1.0 if number % 2 else -1.0  # a full step: fresh weights earn no rewards
        with timed("training"):
            for minibatch in batch.minibatches:
                learner.step(minibatch)
        totals["step_s"] += time.perf_counter() - began
        totals["prompt_tokens"] += sum(len(row.prompt_ids) for row in rows)
        totals["sampled_tokens"] += sum(len(row.response_ids) for row in rows)
        totals["trained_rows_tokens"] += sum(row.num_tokens for row in rows)
        totals["rollout_flops"] += rollout_flops(flops, rows)
        totals["training_flops"] += training_flops(flops, rows)
    parameters = sum(p.numel() for p in lm.parameters())
    return {"parameters": parameters, "totals": dict(totals), "seconds": dict(SECONDS), "steps": steps}


def report(config: RunConfig, result: dict[str, Any], peaks: dict[str, float]) -> dict[str, Any]:
    seconds, totals = result["seconds"], result["totals"]
    peak = max(peaks.values())
    seconds["rollout: decoding"] = (
        seconds.pop("rollout: generate") - seconds["rollout: prefill"] - seconds["rollout: sampling"]
    )
    parts = {k: v for k, v in seconds.items() if ":" in k}
    for phase in ("rollout", "training"):
        parts[f"{phase}: rest"] = seconds[phase] - sum(v for k, v in parts.items() if k.startswith(phase))
    parts["rows and advantages"] = seconds["rows"]
    rollout_tokens = totals["prompt_tokens"] + totals["sampled_tokens"]
    return {
        "threads": torch.get_num_threads(),
        "parameters": result["parameters"],
        "matmul_peak_gflops": {name: round(value / 1e9, 1) for name, value in peaks.items()},
        "rollout": {
            "tokens_per_s": round(rollout_tokens / seconds["rollout"]),
            "sampled_tokens_per_s": round(totals["sampled_tokens"] / seconds["rollout"]),
            "share_of_peak": round(totals["rollout_flops"] / seconds["rollout"] / peak, 4),
        },
        "training": {
            "tokens_per_s": round(totals["trained_rows_tokens"] / seconds["training"]),
            "share_of_peak": round(totals["training_flops"] / seconds["training"] / peak, 4),
        },
        "step_seconds": round(totals["step_s"] / result["steps"], 3),
        "share_of_step": {k: round(v / totals["step_s"], 4) for k, v in sorted(parts.items(), key=lambda x: -x[1])},
        "batch": [config.rollout.batch_size, config.rollout.group_size],
    }


def show(r: dict[str, Any]) -> None:
    tasks, group = r["batch"]
    print(f"model: {r['parameters']:,} parameters, float32, {r['threads']} threads; batch {tasks} x {group}")
    for name, value in r["matmul_peak_gflops"].items():
        print(f"matmul {name:24} {value:8.1f} GFLOP/s")
    for phase in ("rollout", "training"):
        share = r[phase]["share_of_peak"]
        print(f"{phase:9} {r[phase]['tokens_per_s']:8,} tokens/s   {share:6.1%} of the matmul peak")
    print(
        f"          {r['rollout']['sampled_tokens_per_s']:8,} of the rollout's tokens/s are sampled, the others prompt"
    )
    print(f"one step of rollout and training: {r['step_seconds']} s, of which")
    for name, share in r["share_of_step"].items():
        print(f"  {share:6.1%}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after one that is not counted")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--sharing", nargs="+", choices=("on", "off"), help="of prefixes; the preset's own unless given"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = resolve(arguments.preset, None, arguments.overrides).config
    width, wide = config.model.tiny.hidden_size, config.model.tiny.intermediate_size
    peaks = {
        "1024 x 1024 x 1024": matmul_peak(1024, 1024, 1024),
        f"8192 x {width} x {wide}": matmul_peak(8192, width, wide),
    }
    reports = {}
    for sharing in arguments.sharing or [""]:
        if sharing:
            config.rollout.share_prefixes = config.train.share_prefixes = sharing == "on"
        reports[sharing] = report(config, measure(config, arguments.steps), peaks)
        if arguments.json:
            print(json.dumps(reports[sharing] | {"share_prefixes": config.train.share_prefixes}))
        else:
            print(f"\nprefixes of a group computed {'once' if config.train.share_prefixes else 'for each row'}")
            show(reports[sharing])
    if {"on", "off"} <= set(reports) and not arguments.json:
        off, on = (reports[sharing]["step_seconds"] for sharing in ("off", "on"))
        print(f"\nshared over not shared: {off / on:.2f} times the speed of a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
