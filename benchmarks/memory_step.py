"""One training step of the memory-agent workload, split into its parts; asynchronous over synchronous step time.

    python3 benchmarks/memory_step.py TOKENIZER_FOLDER [--shape 1.5B] [--staleness 0 1] [--steps 6] [--flags "…"]
    python3 benchmarks/memory_step.py TOKENIZER_FOLDER --shape tiny --engine vllm --steps 3 --documents 2 --group 2

Real runs of the trainer (`python -m trainer`) with random weights of a shape: 32 documents of four sections of about
2000 tokens, 8 trajectories each, 256 tokens of memory, rewards by the toss of a coin so that everything is trained on.
SGLang samples on GPU 0, FSDP trains on GPU 1, weights go over NCCL. Printed, a JSON object a line: for every staleness
the median step after the first two, its parts in seconds, tokens/s of sampling and training, MFU, |policy ratio - 1|;
and last the time of the asynchronous step over that of the synchronous one. The physical limit of the asynchronous step
is the longer of the two halves of the synchronous one: `of_limit` is that over its own time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {  # Qwen2.5-1.5B
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


class Coin:
    """A reward that knows nothing: every group has something to learn from."""

    def __init__(self, _config: Any) -> None:
        self._coin = random.Random(0)

    def score(self, _task: Any, _trajectory: Any) -> float:
        return float(self._coin.random() < 0.5)


def write_model(folder: Path, shape: str, tokenizer: str) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        lm = Qwen2ForCausalLM(Qwen2Config(**SHAPES[shape], bos_token_id=0, eos_token_id=2))
    torch.set_default_dtype(torch.float32)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def settings(arguments: argparse.Namespace, model: Path, work: Path, staleness: int) -> dict[str, Any]:
    gpus = arguments.engine == "sglang"
    tiny = arguments.shape == "tiny"
    return {
        "experiment_name": "memory-step",
        "trial_name": f"staleness-{staleness}",
        "fileroot": str(work / "runs"),
        "code_dir": str(ROOT / "benchmarks"),
        "n_gpus_per_node": 2 if gpus else 0,
        "allocation_mode": "sglang:d1+fsdp:d1" if gpus else "",
        "servers": {"engine": arguments.engine, "flags": shlex.split(arguments.flags)},
        "model": {"path": str(model), "dtype": "bfloat16"},
        "task": {
            "name": "needles",
            "min_chunks": 4,
            "max_chunks": 4,
            "filler_per_chunk": 20 if tiny else 215,
            "facts_per_chunk": 2,
        },
        "reward": {"name": "memory_step:Coin"},
        "agent": {
            "template": "memagent",
            "chunk_tokens": 512 if tiny else 2048,
            "max_question_tokens": 64,
            "max_memory_tokens": 8 if tiny else 256,
            "max_final_tokens": 8 if tiny else 256,
        },
        "rollout": {
            "batch_size": arguments.documents,
            "group_size": arguments.group,
            "max_staleness": staleness,
            "gpu_memory_fraction": 0.85,
            "save_trajectories": False,
        },
        "train": {"total_steps": arguments.steps, "learning_rate": 1e-6, "max_tokens_per_mb": 32768},
        "eval": {"every_steps": 0, "num_tasks": 1, "blank_memory": False},
        "checkpoint": {"ckpt_first_step": 1000, "save_freq_epochs": 0},
        "monitor": {"tensorboard": False},
    }


def run(config: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    """The step records of one run of the trainer."""
    file = work / f"{config['trial_name']}.yaml"
    file.write_text(yaml.safe_dump(config))
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-m", "trainer", str(file)], env=environment, check=True)
    (metrics,) = (work / "runs" / "logs").glob(f"*/memory-step/{config['trial_name']}/metrics.jsonl")
    return [r for line in metrics.read_text().splitlines() if (r := json.loads(line))["kind"] == "step"]


def summary(steps: list[dict[str, Any]], staleness: int) -> dict[str, Any]:
    used = steps[2:] or steps[-1:]

    def median(value: Any) -> float:
        return round(statistics.median(value(step) for step in used), 4)

    stats = used[0]["stats"]
    parts = {name: median(lambda s, n=name: s["timings"].get(n, 0.0)) for name in used[0]["timings"]}
    wanted = ("mfu", "train_tokens_per_s", "mismatch_kl", "behave_ratio_max_dev", "staleness_mean", "staleness_max")
    wanted += ("weights_pause_s", "weights_transfer_s", "weights_resume_s", "gpu_memory_peak_gib")
    wanted += ("prompt_tokens", "sampled_tokens", "trained_tokens")
    return {
        "staleness": staleness,
        "steps_used": len(used),
        "step_s": median(lambda s: s["step_time_s"]),
        "parts_s": parts,
        **{name: median(lambda s, n=name: s["stats"][n]) for name in wanted if name in stats},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", help="folder with an instruction model's tokenizer (its weights are not read)")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--flags", default="", help="more options for the servers")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="memory-step-") as name:
        work = Path(name)
        began = time.perf_counter()
        write_model(work / "model", arguments.shape, arguments.tokenizer)
        print(json.dumps({"model_written_s": round(time.perf_counter() - began, 1)}), flush=True)
        for staleness in arguments.staleness:
            found[staleness] = summary(run(settings(arguments, work / "model", work, staleness), work), staleness)
            print(json.dumps(found[staleness]), flush=True)
    if 0 in found:
        sync = found[0]
        halves = max(sync["parts_s"]["rollout"], sync["parts_s"]["train"])
        for staleness, one in found.items():
            if staleness:
                ratio = {"async_over_sync": round(one["step_s"] / sync["step_s"], 3), "staleness": staleness}
                print(json.dumps(ratio | {"of_limit": round(halves / one["step_s"], 3)}), flush=True)


if __name__ == "__main__":
    main()
