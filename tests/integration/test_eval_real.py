"""Evaluations of real data: RULER-HQA by a small model on the embedded engine, whose tokens are SmolLM2's; GSM8K by
SmolLM2-135M on a real vLLM server, which is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from evalparts import small_smollm2
from runs import ENVIRONMENT, REPOSITORY, wait_for

from evaluation.config import EvalConfig
from tests.vllmflags import FLAGS
from tests.vllmserver import vllm_python


def start(config: EvalConfig, folder: Path) -> subprocess.Popen[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump()))
    argv = [sys.executable, "-m", "evaluation", str(path)]
    environment = {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": (folder / "stderr.log").open("w"), "text": True}
    return subprocess.Popen(argv, cwd=REPOSITORY, env=environment, **pipes)  # type: ignore[call-overload]


def ended(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, (folder / "stderr.log").read_text()[-3000:]
    return json.loads((Path(json.loads(out)["results"]) / "results.json").read_text(encoding="utf-8"))


def samples(output: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in output.glob("records/*/samples.jsonl")
        for line in path.read_bytes().split(b"\n")[:-1]
    ]


@pytest.mark.data
@pytest.mark.timeout(1500)
def test_ruler_hqa_of_fifty_documents_on_the_embedded_engine(
    tmp_path: Path, shared_data: Path, smollm2_path: Path
) -> None:
    config = EvalConfig.model_validate(
        {
            "model_path": str(small_smollm2(smollm2_path, tmp_path / "model")),
            "output_path": str(tmp_path / "out"),
            "data_names": ["ruler_hqa@50"],
            "data_path": str(shared_data),
            "num_questions": 1,
            "methods": ["memagent", "rag", "no_context"],
            "rag_top_k": 3,
            "agent": {"chunk_tokens": 1024, "max_memory_tokens": 6, "max_final_tokens": 6},
            "server": {"engine": "embedded", "concurrency": 4},
        }
    )
    results = ended(start(config, tmp_path), tmp_path)
    assert results["status"] == "complete"
    rows = {row["dataset"]: row for row in results["rows"]}
    assert set(rows) == {"ruler_hqa@50", "ruler_hqa@50 rag", "ruler_hqa@50 no_context"}
    for row in rows.values():
        assert (row["answers"], row["missing"]) == (1, 0)
        assert set(row["metrics"]) == {"sub_em", "sub_em_1way", "em", "f1", "boxed_em"}
    # About 8,000 tokens are eight or nine chunks of 1024, and the answer.
    (turns,) = [line["turns"] for line in samples(tmp_path / "out") if "final_prompt" in line]
    assert 8 <= turns <= 12


@pytest.mark.data
@pytest.mark.long
@pytest.mark.timeout(2000)
def test_gsm8k_on_a_server_that_dies(tmp_path: Path, shared_data: Path, smollm2_path: Path) -> None:
    config = EvalConfig.model_validate(
        {
            "model_path": str(smollm2_path),
            "output_path": str(tmp_path / "out"),
            "data_names": ["gsm8k"],
            "data_path": str(shared_data),
            "num_questions": 6,
            "n_sampling": 2,
            "max_gen_tokens": 24,
            "grading_workers": 1,
            "server": {
                "engine": "vllm",
                "python": vllm_python(),
                "flags": [*FLAGS],
                "concurrency": 4,
                "context_length": 1024,
            },
        }
    )
    process = start(config, tmp_path)
    wait_for_answers(process, tmp_path, 3)
    server_of(process).kill()
    results = ended(process, tmp_path)

    said = (tmp_path / "stderr.log").read_text()
    assert "vllm-0 is lost: it was ended by SIGKILL" in said
    assert "It is started again (1 of 3)\nvllm-0 answers again" in said
    (row,) = results["rows"]
    assert (results["status"], row["answers"], row["missing"]) == ("complete", 18, 0)
    assert all(not line.get("error") for line in samples(tmp_path / "out"))
    assert "vLLM" in results["versions"]


def server_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The vLLM server that an evaluation started."""
    children = psutil.Process(process.pid).children(recursive=True)
    (server,) = [
        child
        for child in children
        if "vllm.entrypoints.openai.api_server" in (words := child.cmdline()) and "guard.py" not in " ".join(words)
    ]
    return server


def wait_for_answers(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Until so many are written; the server's start alone may take more than wait_for's own two minutes."""
    for _ in range(5):
        try:
            wait_for(lambda: len(samples(folder / "out")) >= count or process.poll() is not None)
            break
        except AssertionError:
            continue
    assert process.poll() is None, (folder / "stderr.log").read_text()[-3000:]
