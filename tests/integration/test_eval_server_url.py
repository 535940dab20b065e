"""Evaluations on a server that somebody else started: SmolLM2-135M on a real vLLM server on the CPU, by its address.

The same server answers for the checkpoint and is the reader of its structured memories, on texts of real HotpotQA
documents. Killed in the middle, it is waited for as long as is said, and the same command goes on when it is back.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import ENVIRONMENT, wait_for
from vllmserver import start_vllm

from trainer.engines.process import ServerProcess, free_port

pytestmark = [pytest.mark.data, pytest.mark.long, pytest.mark.timeout(1500)]

EIGHT_AT_ONCE = ("--max-num-seqs", "8")


class Serving:
    """The server, which can be killed and started again at its address."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.port = model, folder, free_port("127.0.0.1")
        self.process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        changes: dict[str, Any] = {"port": self.port, "flags": EIGHT_AT_ONCE, "context_length": 2048}
        _, self.process = asyncio.run(start_vllm(self.model, self.folder / "vllm.log", **changes))

    def stop(self) -> None:
        if self.process is not None:
            asyncio.run(self.process.stop())
            self.process = None


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    serving = Serving(smollm2_path, tmp_path_factory.mktemp("server"))
    serving.start()
    yield serving
    serving.stop()


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "clusterkit.cli.main", *map(str, words)]


def clusterkit(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words), cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def texts(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of Mem-alpha's schema, made of real documents as a user makes them."""
    folder = tmp_path_factory.mktemp("texts")
    shape = ["--questions", "2", "--documents", "5", "--chunk-words", "200"]
    clusterkit(
        "data", "prepare", "memalpha", "--from", shared_data / "hotpotqa", *shape, "--out", "memalpha", cwd=folder
    )
    return folder


def evaluation(server: Serving, texts: Path, out: Path, agent: str, *more: str) -> list[str | Path]:
    """Words of an evaluation of two texts with two questions each."""
    limits = {"chunk_tokens": 400, "max_memory_tokens": 32, "max_final_tokens": 12}
    limits |= {"context_tokens": 1536} if agent == "memalpha" else {"max_question_tokens": 128}
    settings = {f"agent.{key}": value for key, value in limits.items()}
    settings |= {"agent.name": agent, "judge.url": server.url, "judge.answer_tokens": 12, "rag_top_k": 2}
    words: list[str | Path] = ["eval", "--model-path", server.model, "--data-names", "memalpha", "--data-path", texts]
    words += ["--num-questions", "2", "--output-path", out, "--cache-dir", out / "cache", "--server-url", server.url]
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return [*words, *more]


def test_structured_memories_and_what_they_are_compared_with(server: Serving, texts: Path, tmp_path: Path) -> None:
    words = evaluation(server, texts, tmp_path / "out", "memalpha")
    methods = ["--methods", "memagent,long_context,rag,no_context"]
    results = json.loads(clusterkit(*words, *methods, "--json", cwd=tmp_path).stdout)
    assert results["status"] == "complete"
    rows = {row["dataset"]: row for row in results["rows"]}
    name = "memalpha-hotpotqa"
    assert list(rows) == [name, f"{name} long_context", f"{name} rag", f"{name} no_context"]
    for row in rows.values():
        assert (row["num_questions"], row["answers"], row["missing"]) == (4, 4, 0)
        assert 0.0 <= row["greedy_acc"] <= 1.0
    assert "memory_tokens" in rows[name]
    lines = [line for line in samples(tmp_path / "out") if "tool_calls" in line["counters"]]
    assert len(lines) == 4
    assert all(line["text"] and line["turns"] > 1 for line in lines)  # the reader's words; a text has several chunks

    one = json.loads(
        clusterkit(*evaluation(server, texts, tmp_path / "one", "memagent"), "--json", cwd=tmp_path).stdout
    )
    (row,) = one["rows"]
    assert (row["dataset"], row["answers"], row["missing"]) == (name, 4, 0)
    assert 0 < row["memory_tokens"] <= 32
    table = clusterkit(*evaluation(server, texts, tmp_path / "one", "memagent"), cwd=tmp_path).stdout
    header, cells = (line.split("\t") for line in table.splitlines())
    assert float(dict(zip(header, cells, strict=True))["memory_tokens"]) == round(row["memory_tokens"])


def test_a_running_server_is_asked_with_token_ids_where_its_engine_is_named(
    server: Serving, texts: Path, tmp_path: Path
) -> None:
    words = [*evaluation(server, texts, tmp_path / "out", "memagent", "--engine", "vllm"), "--json"]
    results = json.loads(clusterkit(*words, cwd=tmp_path).stdout)
    assert (results["status"], results["rows"][0]["answers"]) == ("complete", 4)
    (inputs,) = (tmp_path / "out").glob("records/*/inputs.json")
    asked = json.loads(inputs.read_text())["inputs"]
    assert (asked["engine"], asked["url"]) == ("vllm", server.url)

    nowhere = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    words[words.index(server.url)] = nowhere
    done = subprocess.run(
        command(*words), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert f"no vLLM that can be asked with token ids answers at {nowhere}" in done.stderr
    assert "--engine openai" in done.stderr


def test_a_server_that_is_killed_is_waited_for_and_the_evaluation_goes_on_later(
    server: Serving, texts: Path, tmp_path: Path
) -> None:
    words = evaluation(server, texts, tmp_path / "out", "memagent", "--n-sampling", "1", "--set", "server.wait_s=2")
    words += ["--set", "server.concurrency=4"]
    with (tmp_path / "stderr.log").open("w") as said:
        process = subprocess.Popen(
            command(*words), cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=said
        )
        wait_for(lambda: len(samples(tmp_path / "out")) >= 3 or process.poll() is not None)
        server.stop()
        assert process.wait(timeout=300) == 1
    told = (tmp_path / "stderr.log").read_text()
    assert f"{server.url} does not answer: the connection failed" in told
    assert "Waiting for it for up to 2 s" in told
    assert "for 2 s now" in told
    assert "start the server again, then the same command; the answers until now are written" in told
    assert "Traceback" not in told
    kept = samples(tmp_path / "out")
    assert 3 <= len(kept) < 8
    assert all(not line.get("error") for line in kept)

    server.start()
    results = json.loads(clusterkit(*words, "--json", cwd=tmp_path).stdout)
    assert (results["status"], results["rows"][0]["answers"]) == ("complete", 8)
    assert samples(tmp_path / "out")[: len(kept)] == kept


def samples(output: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in output.glob("records/*/samples.jsonl")
        for line in path.read_bytes().split(b"\n")[:-1]
    ]
