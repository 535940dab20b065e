"""A training step on real HotpotQA documents, as a user starts it: of a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evalparts import small_smollm2

pytestmark = pytest.mark.data


def train(
    folder: Path, model: Path, data: Path, *settings: str, preset: str = "135M_cpu"
) -> tuple[Path, list[dict[str, Any]]]:
    """Train the preset for one step on short documents, sections and answers; the run's logs, and its records."""
    command = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", preset, "--task", "hotpotqa"]
    common = [
        f"fileroot={folder}",
        "trial_name=one",
        f"model.path={model}",
        f"task.path={data / 'hotpotqa'}",
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
        [*command, *common, *settings], capture_output=True, text=True, env=os.environ, timeout=1400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logs = next(folder.glob(f"logs/*/{preset}-hotpotqa/one"))
    return logs, [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def held_out(logs: Path) -> dict[str, Any]:
    """What `clusterkit trace` tells of the run's first held-out task."""
    command = [sys.executable, "-m", "clusterkit.cli.main", "trace", "--heldout", "--here", "--json"]
    fileroot = str(logs.parents[3])
    done = subprocess.run([*command, "--fileroot", fileroot], capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def saved(records: list[dict[str, Any]]) -> str:
    """The folder of the checkpoint."""
    return str(next(record for record in records if record["kind"] == "save")["path"])


def test_every_turn_of_a_step_is_learned_from(tmp_path: Path, shared_data: Path, smollm2_path: Path) -> None:
    logs, records = train(tmp_path, small_smollm2(smollm2_path, tmp_path / "model"), shared_data)

    step = next(r for r in records if r["kind"] == "step")
    assert len(set(step["task_ids"])) == 2
    assert all(task_id.startswith("train-") for task_id in step["task_ids"])
    # Two trajectories of each task, at least one section and the answer.
    assert step["stats"]["trained_rows"] == step["stats"]["turns"] >= 8
    assert step["stats"]["behave_ratio_max_dev"] <= 1e-3
    assert abs(step["stats"]["mismatch_kl"]) <= 1e-6
    evals = [r for r in records if r["kind"] == "eval"]
    assert {r["name"] for r in evals} == {"before", "after"}
    assert set(evals[0]["metrics"]) >= {"sub_em", "em", "f1", "boxed_em"}
    assert "RPC name actor_train returns {" in (logs / "main.log").read_text()
    assert saved(records).endswith("epoch1epochstep1globalstep1")
    task = held_out(logs)
    assert len(task["sections"]) == len(task["before"]["memories"]) == len(task["after"]["memories"]) >= 1
    assert task["gold"]
    for gold in task["gold"]:  # a sentence of the document, found where the sections are cut
        text = "".join(task["sections"][at["section"] - 1][at["start"] : at["end"]] for at in gold["places"])
        assert text.split() == gold["sentence"].split()
    assert task["before"]["scores"]["f1"] == next(r for r in evals if r["name"] == "before")["metrics"]["f1"]


def test_documents_are_learned_to_read_by_the_miniature_of_the_preset_for_it(
    tmp_path: Path, shared_data: Path, smollm2_path: Path
) -> None:
    prepare = [sys.executable, "-m", "clusterkit.cli.main", "data", "prepare", "reading"]
    made = [*prepare, "--from", str(shared_data / "hotpotqa"), "--out", str(tmp_path / "questions"), "--traces", "40"]
    subprocess.run(made, check=True, capture_output=True, timeout=600)

    logs, records = train(
        tmp_path,
        small_smollm2(smollm2_path, tmp_path / "model"),
        shared_data,
        f"task.path={tmp_path / 'questions'}",
        "eval.final_documents=[3]",
        "eval.final_methods=rag,gold,long_context",
        "supervised.total_steps=2",
        "agent.max_memory_tokens=96",
        preset="135M_read_cpu",
    )

    step = next(r for r in records if r["kind"] == "step")
    assert step["stats"]["trained_rows"] == step["stats"]["turns"] >= 8
    assert 0.0 <= step["stats"]["memory_holds"] <= 1.0
    assert all(task_id.startswith("train-") for task_id in step["task_ids"])
    assert {r["name"] for r in records if r["kind"] == "eval"} == {"before", "after"}
    assert [r["step"] for r in records if r.get("phase") == "supervised"][-1] == 2
    summary = json.loads((logs / "summary.json").read_text())
    lines = [(row["documents"], row["blank_memory"], row["method"]) for row in summary["table"]]
    assert lines[:3] == [(0, False, ""), (3, False, ""), (0, True, "")]
    assert lines[3:] == [(n, False, method) for method in ("rag", "gold", "long_context") for n in (0, 3)]
    assert all(row[side] is not None for row in summary["table"] for side in ("before", "after"))
    assert summary["supervised"]["heldout_loss"]["after"] < summary["supervised"]["heldout_loss"]["before"]
