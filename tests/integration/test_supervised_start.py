"""Runs that begin with a supervised start: stopped, killed and gone on with, in it and after it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from evalparts import chat_checkpoint
from raycluster import FOLDER, end_processes_of, own_ports
from realparts import write_jsonl
from runs import ENVIRONMENT, Attempt, Forks, Trial, command, wait_for
from vllmflags import FLAGS as VLLM_FLAGS
from vllmserver import vllm_python

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.status import observe
from clusterkit.runs.trials import choose_trial
from clusterkit.ui.run_status import status_lines
from tests.conftest import mini_hotpotqa_rows
from tests.realparts import require
from trainer.engines.process import free_port
from trainer.serving import registry

START_STEPS, STEPS = 4, 2
SETTINGS: dict[str, Any] = {
    "task": {"name": "hotpotqa", "num_documents": 3, "curriculum": [2], "curriculum_tasks": 2, "train_size": 8},
    "agent": {"template": "memagent", "chunk_tokens": 160, "max_question_tokens": 96, "max_memory_tokens": 96}
    | {"max_final_tokens": 8},
    "reward": {"name": "reading", "memory_bonus_steps": 2},
    "rollout": {"batch_size": 2, "group_size": 2},
    "train": {"total_steps": STEPS, "max_tokens_per_mb": 4096},
    "supervised": {"dataset": "traces.jsonl", "batch_size": 2, "total_steps": START_STEPS, "learning_rate": 1e-3}
    | {"warmup_steps": 1, "eval_tasks": 1},
    "eval": {"every_steps": 0, "num_tasks": 2, "final_documents": [3, 5], "blank_memory": True},
}

METHODS = {"eval.final_methods": ["rag", "gold", "long_context"]}
"""Controls in the closing table."""
NewRun = Callable[..., Trial]


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with their documents, and traces of how to read these."""
    folder = tmp_path_factory.mktemp("questions")
    rows, documents = mini_hotpotqa_rows()
    write_jsonl(folder / "questions.jsonl", rows)
    write_jsonl(folder / "documents.jsonl", documents)
    by_id = {str(one["id"]): one for one in documents}
    traces: list[dict[str, object]] = []
    for row in rows:
        own = [by_id[name] for name in row["own_documents"]]  # type: ignore[attr-defined]
        context = "\n\n".join(f"Document {n}:\n{one['title']}\n{one['text']}" for n, one in enumerate(own, 1))
        evidence = [[one["title"], one["text"]] for one in own[1:]]
        answer = row["answers"][0]  # type: ignore[index]
        traces.append({"problem": row["question"], "context": context, "evidence": evidence, "answer": answer})
    write_jsonl(folder / "traces.jsonl", traces)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("model"), window=2048)


def make(folder: Path, model: Path, questions: Path, **settings: Any) -> Trial:
    paths = {"model.path": str(model), "task": {**SETTINGS["task"], "path": str(questions)}}
    return Trial(folder, folder / "cache", **{**SETTINGS, **paths, **settings})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, forks: Forks, model: Path, questions: Path) -> Trial:
    """A whole run."""
    trial = make(tmp_path_factory.mktemp("undisturbed"), model, questions, **METHODS)
    assert forks.run(trial) == 0, trial.said()
    return trial


@pytest.fixture
def new_run(tmp_path: Path, model: Path, questions: Path) -> NewRun:
    return lambda name="run", **settings: make(tmp_path / name, model, questions, **settings)


def directory(trial: Trial) -> RunDirectory:
    return choose_trial(trial.config, named_by_user=True).run


def start_records(trial: Trial) -> list[dict[str, Any]]:
    """The run's records of its supervised start."""
    return [record for record in trial.records("warmup") if record["phase"] == "supervised"]


def start_steps(trial: Trial) -> list[int]:
    """Steps that the supervised start has done, in its own numbers."""
    path = trial.paths.supervised.logs / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record["global_step"] for record in records if record["kind"] == "step"]


def status_of(trial: Trial) -> str:
    return "\n".join(status_lines(observe(directory(trial), time.time())))


def stop_in_start(attempt: Attempt, trial: Trial, number: signal.Signals) -> int:
    """Send a signal once the start has a recover checkpoint; returns the exit code."""
    assert attempt.reach((trial.paths.supervised.recover / "LATEST").exists), trial.said()
    attempt.send(number)
    return attempt.end()


def test_reinforcement_starts_from_what_was_supervised_and_the_table_compares_both(undisturbed: Trial) -> None:
    trial = undisturbed

    assert start_steps(trial) == list(range(1, START_STEPS + 1))
    assert [step["global_step"] for step in trial.records("step")] == [1, 2]
    assert start_records(trial)[-1]["step"] == START_STEPS
    summary = trial.summary()
    told = summary["supervised"]
    assert told["global_step"] == START_STEPS
    assert told["heldout_loss"]["after"] < told["heldout_loss"]["before"]
    assert summary["time_split"]["supervised"] > 0
    rows = [(row["documents"], row["blank_memory"], row["method"]) for row in summary["table"]]
    assert rows[:3] == [(0, False, ""), (5, False, ""), (0, True, "")]
    assert rows[3:] == [(n, False, method) for method in ("rag", "gold", "long_context") for n in (0, 5)]
    for row in summary["table"]:
        for side in ("before", "after"):
            low, high = row[f"interval_{side}"]
            assert 0.0 <= low <= row[side] <= high <= 1.0
    text = "\n".join(summary_lines(read_summary(directory(trial)) or {}))
    assert "as trained, 3 documents" in text
    assert "5 documents" in text
    assert "3 documents, BM25's top 2" in text
    assert "5 documents, all at once, cut to the window" in text
    assert f"{START_STEPS} supervised steps, held-out loss" in text
    assert "span/f1" in text
    assert len(re.findall(r"Evaluation after \(5 documents, gold documents alone\): F1 \d", trial.log())) == 1
    assert "bm25s" not in trial.log() + trial.said()
    # The log has no line of a step or an end that is not the run's.
    assert trial.log().count("finishes. Average #tokens") == STEPS
    assert trial.log().count("Experiment Completes!") == 1
    assert f"Supervised start: step {START_STEPS} of {START_STEPS}" in trial.log()
    assert "finishes. Average #tokens" in (trial.paths.supervised.logs / "main.log").read_text()
    assert not trial.paths.supervised.recover.exists()


def test_killed_in_its_start_a_run_goes_on_to_the_same_weights(
    forks: Forks, new_run: NewRun, undisturbed: Trial
) -> None:
    trial = new_run()

    assert stop_in_start(forks.start(trial), trial, signal.SIGKILL) == -signal.SIGKILL

    done = len(start_steps(trial))
    told = status_of(trial)
    assert "state        killed" in told
    assert f"supervised start: step {start_records(trial)[-1]['step']} of {START_STEPS}" in told
    assert "step         0/" in told
    assert "command" in trial.records("start")[-1], "status has no command that goes on"
    assert forks.run(trial) == 0, trial.said()
    assert 0 < done <= START_STEPS
    assert len(start_steps(trial)) < done + START_STEPS, "the start began again"
    assert trial.summary()["parameter_sha256"] == undisturbed.summary()["parameter_sha256"]


def test_interrupted_in_its_start_a_run_says_so_and_refuses_other_settings_for_it(
    forks: Forks, new_run: NewRun, undisturbed: Trial
) -> None:
    trial = new_run(**{"supervised.total_steps": 300})

    assert stop_in_start(forks.start(trial), trial, signal.SIGINT) == 130
    assert "interrupted in the supervised start after step" in trial.said()
    assert trial.records("finish")[-1]["status"] == "interrupted"
    assert "recover checkpoint after step" in status_of(trial)
    changed = trial.change(**{"supervised.learning_rate": 2e-3})
    assert forks.run(trial) == 2
    assert "supervised.learning_rate: 0.001 -> 0.002" in trial.said()
    assert changed.supervised.learning_rate == 2e-3


def test_killed_in_reinforcement_a_run_goes_on_without_another_start(
    forks: Forks, new_run: NewRun, undisturbed: Trial
) -> None:
    settings = {"algorithm.kl_coef": 0.01, "train.total_steps": 3}
    trial = new_run(**settings)

    attempt = forks.start(trial)
    assert attempt.reach(lambda: trial.records("recover")), trial.said()
    attempt.send(signal.SIGKILL)
    assert attempt.end() == -signal.SIGKILL
    before = len(start_records(trial))
    assert forks.run(trial) == 0, trial.said()

    assert len(start_records(trial)) == before
    assert len(start_steps(trial)) == START_STEPS
    assert f"Supervised start: done before ({START_STEPS} steps" in trial.log()
    assert trial.records("attempt")[-1]["resume_step"] >= 1
    # Its reference is the supervised checkpoint, as before.
    whole = new_run("whole", **settings)
    assert forks.run(whole) == 0, whole.said()
    assert trial.summary()["parameter_sha256"] == whole.summary()["parameter_sha256"]


def test_a_run_from_another_ones_recover_checkpoint_takes_its_supervised_checkpoint_over(
    forks: Forks, new_run: NewRun, undisturbed: Trial
) -> None:
    trial = new_run(**{"recover_from": str(undisturbed.paths.recover), "train.total_steps": 3})

    assert forks.run(trial) == 0, trial.said()

    assert start_records(trial) == []
    weights = "supervised/model.safetensors"
    ours, theirs = (one.paths.checkpoints.parent / weights for one in (trial, undisturbed))
    assert ours.read_bytes() == theirs.read_bytes()
    assert trial.summary()["supervised"]["global_step"] == START_STEPS


def test_what_is_wrong_with_the_examples_or_lengths_shows_before_the_start(
    forks: Forks, new_run: NewRun, tmp_path: Path, questions: Path
) -> None:
    for settings, message in (
        ({"supervised.batch_size": 99}, "supervised.batch_size=99 is more than the"),
        ({"eval.final_documents": [99]}, "contexts of 99 documents are asked for (eval.final_documents)"),
        ({"supervised.dataset": "none.jsonl"}, "supervised.dataset=none.jsonl: there is no file"),
    ):
        trial = new_run(**settings)
        assert forks.run(trial) == 2, trial.said()
        assert message in trial.said()
        assert start_records(trial) == []
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize("named", [True, False])
def test_without_its_traces_a_run_is_refused_and_nothing_is_written(
    tmp_path: Path, mini_hotpotqa: Path, named: bool
) -> None:
    model = chat_checkpoint(tmp_path / "model", window=2048)
    command = [sys.executable, "-m", "clusterkit.cli.main", "train", "--preset", "135M_read_cpu", "--here"]
    places = [
        f"model.path={model}",
        f"fileroot={tmp_path / 'runs'}",
        *([f"task.path={mini_hotpotqa}"] if named else []),
    ]

    done = subprocess.run([*command, *places], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "supervised.dataset=traces.jsonl: there is no file" in line
    assert "clusterkit data prepare reading" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_two_ranks_share_a_start(forks: Forks, new_run: NewRun, undisturbed: Trial) -> None:
    trial = new_run(**{"train.ranks": 2}, **METHODS)

    assert forks.run(trial) == 0, trial.said()

    assert start_steps(trial) == list(range(1, START_STEPS + 1))
    assert [row["method"] for row in trial.summary()["table"]] == [
        row["method"] for row in undisturbed.summary()["table"]
    ]
    mine, other = (one.summary()["supervised"]["heldout_loss"]["after"] for one in (trial, undisturbed))
    assert mine == pytest.approx(other, rel=1e-4)


@pytest.mark.long
def test_servers_start_beside_the_supervised_start_and_sample_with_its_weights(tmp_path: Path, questions: Path) -> None:
    model = chat_checkpoint(tmp_path / "model", window=2048, hidden=128, heads=2)  # as large as vLLM's kernels want it
    servers = {"engine": "vllm", "python": vllm_python(), "flags": [*VLLM_FLAGS]}
    more = {"supervised.learning_rate": 1e-2, "algorithm.kl_coef": 0.01, "servers.restarts": 1}
    more |= METHODS
    trial = make(tmp_path / "run", model, questions, servers=servers, **more)
    folder = registry.folder_of(trial.paths.logs)

    running = command(trial, env={**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1"})
    assert wait_for(lambda: trial.records("step") or running.poll() is not None), trial.log()
    [server] = registry.read(folder)
    for process in psutil.Process(server.pid).children():  # its host starts it again, with the weights it began with
        process.kill()
    said = running.communicate(timeout=900)

    assert running.returncode == 0, said
    assert start_steps(trial) == list(range(1, START_STEPS + 1))
    table = trial.summary()["table"]
    assert {row["method"] for row in table} == {"", *METHODS["eval.final_methods"]}
    assert all(row[side] is not None for row in table for side in ("before", "after"))
    losses = trial.summary()["supervised"]["heldout_loss"]
    assert losses["before"] - losses["after"] > 0.1, "the weights are others now"
    assert server.model == str(model)  # not the checkpoint of the start, which it did not wait for
    assert trial.log().count("engine server server-0 joins") == 2
    # What the server samples with is what the trainer computes: before anything was published, and started again.
    for step in trial.records("step"):
        assert step["stats"]["behave_ratio_max_dev"] <= 1e-2


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """A Ray of one node, and what finds it."""
    require(importlib.util.find_spec("ray") is not None, "needs Ray: pip install ray")
    folder, port = Path(tempfile.mkdtemp(prefix="ck-ray-")), free_port()  # Ray's sockets want a short path
    found = {**ENVIRONMENT, "RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_USAGE_STATS_ENABLED": "0", FOLDER: str(folder)}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", f"--temp-dir={folder}"]
    options = ["--include-dashboard=false", "--num-cpus=4", "--num-gpus=0", "--node-ip-address=127.0.0.1"]
    subprocess.run([*start, *options, *own_ports()], check=True, env=found, capture_output=True, timeout=300)
    yield found
    end_processes_of(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_on_ray_the_start_and_reinforcement_come_one_after_the_other(
    new_run: NewRun, undisturbed: Trial, ray_environment: dict[str, str]
) -> None:
    trial = new_run(**{"train.ranks": 2, "mode": "ray"})

    running = command(trial, env=ray_environment)
    said = running.communicate(timeout=600)

    assert running.returncode == 0, said
    assert start_steps(trial) == list(range(1, START_STEPS + 1))
    assert [step["global_step"] for step in trial.records("step")] == [1, 2]
    assert trial.log().count("ranks run on") == 2
    mine, other = (one.summary()["supervised"]["heldout_loss"]["after"] for one in (trial, undisturbed))
    assert mine == pytest.approx(other, rel=1e-4)
