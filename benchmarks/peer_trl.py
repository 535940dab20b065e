"""Training steps of TRL's GRPOTrainer over given rows; started by peers.py with the packages of peers.txt.

    python3 benchmarks/peer_trl.py trl|trl-best FOLDER

FOLDER has `model` and job.json: prompts (token ids), turns (conversations of a trajectory), group (completions of a
prompt), new (tokens of a completion), micro_batch (rows), steps, vllm (false: TRL generates by itself). Imports nothing
of ours. Printed: a JSON object a step.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SYSTEMS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl-best": {"torch_compile": True, "pad_to_multiple_of": 128, "vllm_importance_sampling_correction": False},
}


def peer(system: str, folder: Path) -> None:
    """Make the steps of one TRL system over the rows of a folder; prints their lines."""
    job = json.loads((folder / "job.json").read_text())
    prompts: list[list[int]] = job["prompts"]
    group, new, served = job["group"], job["new"], job["vllm"]
    rows = len(prompts) * group
    coin = random.Random(0)
    spent: dict[str, float] = {}
    gpu = torch.cuda.is_available()

    def now() -> float:
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Trainer(GRPOTrainer):
        """GRPOTrainer on token ids, with a clock."""

        def _tokenize_prompts(self, names: list[str]) -> Any:
            return [prompts[int(name)] for name in names], None, {}

        def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
            began = now()
            found = super()._generate_single_turn(*arguments, **named)
            spent["rollout"] = now() - began
            assert {len(ids) for ids in found[0]} == {new}, "completions are to have the same length"
            return found

        def _generate_and_score_completions(self, *arguments: Any, **named: Any) -> Any:
            began = now()
            found = super()._generate_and_score_completions(*arguments, **named)
            spent["old_logprobs"] = now() - began - spent["rollout"]
            return found

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now()

        def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
            step_s = now() - self.began
            parts = {**spent, "train": step_s - sum(spent.values())}
            tokens = group * sum(map(len, prompts)) + rows * new
            memory = {"gpu_memory_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)} if gpu else {}
            told = {"step_s": step_s, "parts_s": parts, "tokens": tokens, "trajectories": rows // job["turns"]}
            print(json.dumps({"step": state.global_step, **told, **memory}), flush=True)

    every = rows // job["micro_batch"]
    length = {"ignore_eos": True, "min_tokens": new} if served else {"min_new_tokens": new}
    settings: dict[str, Any] = {
        "output_dir": str(folder / system),
        "max_steps": job["steps"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": every,
        "steps_per_generation": every,
        "num_generations": group,
        "max_completion_length": new,
        "generation_kwargs": length,
        "learning_rate": 1e-6,
        "beta": 0.0,
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused",
        "bf16": gpu,
        "use_cpu": not gpu,
        "use_vllm": served,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": served,
        "vllm_max_model_length": max(map(len, prompts)) + new,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1000,
    }
    trainer = Trainer(
        model=str(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=lambda completions, **_: [float(coin.random() < 0.5) for _ in completions],
        args=GRPOConfig(**settings | SYSTEMS[system]),
        # With a name of its own: making one up pickles the table, which some versions of dill cannot.
        train_dataset=Dataset(pyarrow.table({"prompt": [str(n) for n in range(len(prompts))]}), fingerprint="rows"),
        callbacks=[Clock()],
    )
    trainer.train()


if __name__ == "__main__":
    peer(sys.argv[1], Path(sys.argv[2]))
