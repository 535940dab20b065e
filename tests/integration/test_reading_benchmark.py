"""benchmarks/reading.py as it is called, in miniature: trains, evaluates, records; a second call has nothing to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from evalparts import small_smollm2

REPOSITORY = Path(__file__).parents[2]
SETTINGS = (
    "train.total_steps=1 train.threads=1 task.num_documents=2 agent.chunk_tokens=256 agent.max_memory_tokens=16 "
    "agent.max_final_tokens=8 rollout.group_size=2 eval.num_tasks=1"
).split()


@pytest.mark.long
@pytest.mark.data
def test_every_arm_is_trained_evaluated_and_recorded_once(
    tmp_path: Path, shared_data: Path, smollm2_path: Path
) -> None:
    base, start = (str(small_smollm2(smollm2_path, tmp_path / name)) for name in ("base", "start"))
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "reading.py"), "run", str(shared_data / "hotpotqa")]
    command += ["--out", str(tmp_path / "out"), "--records", str(tmp_path / "records.jsonl"), "--engine", "embedded"]
    command += ["--preset", "135M_cpu", "--task", "hotpotqa", "--model", base, "--supervised", start, "--seeds", "1"]
    command += ["--documents", "4", "--control-documents", "4", "--num-questions", "3"]
    command += [word for setting in SETTINGS for word in ("--set", setting)]

    def call() -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=850, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = call()
    stages = [line for line in first.split("\n") if line.startswith("{")]
    assert len(stages) == 6  # two trainings, four checkpoints
    for arm in ("trained: gold documents", "supervised only: BM25 top 2", "shuffled rewards: memory"):
        assert f"| {arm} |" in first
    records = (tmp_path / "records.jsonl").read_bytes()
    assert records.count(b'"kind":"cell"') == 2 * 6 + 2 * 2
    assert (tmp_path / "records.svg").read_bytes().startswith(b"<svg")

    again = call()
    assert not [line for line in again.split("\n") if line.startswith("{")]
    assert again.split("4 documents:")[1] == first.split("4 documents:")[1]
    assert (tmp_path / "records.jsonl").read_bytes() == records
