"""SmolLM2-135M through a complete training step on real HotpotQA documents, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.data
@pytest.mark.timeout(1500)
def test_a_real_model_takes_a_whole_step_on_real_documents(
    tmp_path: Path, shared_data: Path, smollm2_path: Path
) -> None:
    # The preset as it is, but shorter: one step, short documents, sections and answers, one held-out task.
    command = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "135M_cpu", "--task", "hotpotqa"]
    settings = [
        f"fileroot={tmp_path}",
        "trial_name=one",
        f"model.path={smollm2_path}",
        f"task.path={shared_data / 'hotpotqa'}",
        "task.num_documents=2",
        "train.total_steps=1",
        "train.threads=1",
        "agent.chunk_tokens=192",
        "agent.max_memory_tokens=24",
        "agent.max_final_tokens=16",
        "rollout.group_size=2",
        "eval.num_tasks=1",
    ]
    done = subprocess.run(
        [*command, *settings], capture_output=True, text=True, env=os.environ, timeout=1400, check=False
    )

    assert done.returncode == 0, done.stderr[-3000:]
    logs = next(tmp_path.glob("logs/*/135M_cpu-hotpotqa/one"))
    records = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    step = next(r for r in records if r["kind"] == "step")
    assert len(set(step["task_ids"])) == 2
    assert all(task_id.startswith("train-") for task_id in step["task_ids"])
    # Every turn was trained on: two trajectories of each task, at least one section and the answer.
    assert step["stats"]["trained_rows"] == step["stats"]["turns"] >= 8
    assert step["stats"]["behave_ratio_max_dev"] <= 1e-3
    assert abs(step["stats"]["mismatch_kl"]) <= 1e-6
    evals = [r for r in records if r["kind"] == "eval"]
    assert {r["name"] for r in evals} == {"before", "after"}
    assert set(evals[0]["metrics"]) >= {"sub_em", "em", "f1", "boxed_em"}
    assert "RPC name actor_train returns {" in (logs / "main.log").read_text()
    saved = next(r for r in records if r["kind"] == "save")["path"]
    assert saved.endswith("epoch1epochstep1globalstep1")
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])
