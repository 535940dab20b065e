"""`clusterkit eval` as a user types it: a run's checkpoints, their curve, one answer, the pages, wrong words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import run_clusterkit
from evalparts import chat_checkpoint, problems_file, recall_checkpoint, recall_config
from runs import ENVIRONMENT, wait_for

from clusterkit.evaluate import process
from clusterkit.evaluate.request import LIMITS, choose_checkpoint, make_request, run_of
from clusterkit.runs.directory import lock_holder, user_name
from evaluation.config import EvalConfig
from evaluation.record import output_lock
from trainer.config import RunConfig
from trainer.errors import UserError


def clusterkit(*words: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_clusterkit(*words, cwd=cwd, env=ENVIRONMENT)
    assert done.returncode == code, done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fileroot with a run of two checkpoints of random weights, laid out as the trainer does."""
    root = tmp_path_factory.mktemp("fileroot") / "runs"
    actor = root / "checkpoints" / user_name() / "tiny-recall" / "run1" / "actor"
    recall_checkpoint(actor / "epoch1epochstep2globalstep2")
    shutil.copytree(actor / "epoch1epochstep2globalstep2", actor / "epoch1epochstep10globalstep10")
    asked = recall_config(Path("x"), Path("y"))
    values: dict[str, Any] = {"agent": asked.agent.model_dump(), "task": asked.task.model_dump()}
    logs = root / "logs" / user_name() / "tiny-recall" / "run1"
    logs.mkdir(parents=True)
    (logs / "config.yaml").write_text(yaml.safe_dump(RunConfig.model_validate(values).model_dump()))
    return root


def test_the_newest_checkpoint_is_read_with_the_settings_of_its_run(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--fileroot", run_folder, "--output_path", out, "--num-questions", "3", "--n_sampling", "2"]
    done = clusterkit("eval", *words, "--json", "--cache-dir", tmp_path / "cache", cwd=tmp_path)
    results = json.loads(done.stdout)
    assert results["model_path"].endswith("epoch1epochstep10globalstep10")
    (row,) = results["rows"]
    assert (row["dataset"], row["num_questions"], row["samples"]) == ("recall", 3, 2)
    assert results["config"]["agent"]["chunk_tokens"] == 10
    assert "9/9 answers" in done.stderr

    again = clusterkit("eval", *words, "--cache-dir", tmp_path / "cache", cwd=tmp_path)
    assert "every answer is in the record" in again.stderr
    header, cells = (line.split("\t") for line in again.stdout.splitlines())
    assert " ".join(header[:5]) == "dataset num_questions greedy_length sample_length greedy_acc"
    assert (header[-1], cells[0], cells[1], cells[-1]) == ("checkpoint", "recall", "3", "epoch1epochstep10globalstep10")
    assert len(header) == len(cells)

    shown = clusterkit("eval", "show", out, "--question", "2", "--sample", "1", cwd=tmp_path).stdout
    assert "recall, question 2 (id test-0-1)" in shown
    assert "--- prompt\n<u> question" in shown
    assert "--- answer 1: wrong" in shown
    listed = clusterkit("eval", "show", out, cwd=tmp_path).stdout
    assert len(listed.splitlines()) == 3
    refused = clusterkit("eval", "show", out, "--question", "9", cwd=tmp_path, code=2)
    assert "give a number from 1 to 3" in refused.stderr

    (place,) = out.glob("epoch*")
    page = (place / "index.html").read_text(encoding="utf-8")
    assert "3 of 3 questions with a wrong answer" in page
    assert "&lt;u&gt; question" in page
    assert "<script" not in page


def test_watch_scores_every_checkpoint_and_draws_the_curve(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--num-questions", "2", "--output-path", out, "--cache-dir", tmp_path / "cache"]
    done = clusterkit("eval", "--watch", run_folder, "--once", *words, "--json", cwd=tmp_path)
    scored = [json.loads(line) for line in done.stdout.splitlines()]
    assert [Path(one["model_path"]).name for one in scored] == [
        "epoch1epochstep2globalstep2",
        "epoch1epochstep10globalstep10",
    ]
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "greedy_acc, training steps 10:" in page
    report = clusterkit("report", "--fileroot", run_folder, "--out", "-", cwd=tmp_path).stdout
    assert "Scores of its checkpoints" in report
    assert "greedy_acc, training steps 10:" in report
    compared = clusterkit("eval", *words, "--fileroot", run_folder, "--compare", out, cwd=tmp_path)
    assert "McNemar" not in compared.stdout
    assert "difference" in compared.stderr


@pytest.mark.parametrize(
    ("names", "against"),
    [
        (("model0", "model1"), ["model0"]),
        (("run0/step6", "run1/step6"), ["out0"]),
        (("run0/step6", "run1/step6", "model0", "model1"), ["out0", "out1", "model0"]),
    ],
)
def test_checkpoints_are_compared_question_by_question(
    tmp_path: Path, names: tuple[str, ...], against: list[str]
) -> None:
    data = problems_file(tmp_path)
    common = ["--data-names", data, "--max-gen-tokens", "6", "--n-sampling", "0", "--cache-dir", tmp_path / "cache"]
    compare: list[str | Path] = []
    for seed, folder in enumerate(names):
        model = chat_checkpoint(tmp_path / folder, seed)
        out = tmp_path / f"out{seed}"
        last = compare if seed + 1 == len(names) else []
        done = clusterkit("eval", "--model-path", model, "--output-path", out, *common, *last, "--json", cwd=tmp_path)
        compare += ["--compare", out]
    found = json.loads(done.stdout)["comparisons"]
    assert [(one["dataset"], one["against"], one["questions"]) for one in found] == [("sums", n, 3) for n in against]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data-names", "math500"], "Did you mean math_500"),
        (["--data-names", "recall", "--methods", "memgent"], "methods"),
        (["--data-names", "recall", "--set", "agent.chunk_token=5"], "did you mean agent.chunk_tokens"),
        (["--data-names", "recall", "--temperature", "0"], "temperature"),
        (["--data-names", "recall", "--compare", "nowhere"], "no results.json of an evaluation there"),
        (["--data-names", "recall", "--engine", "openai"], "give the address of a running server"),
        (["--data-names", "recall", "--prompt-type", "x", "--model-path", "/nowhere"], "there is no such folder"),
        (["--watch", "/nowhere"], "there is no such folder"),
    ],
    ids=str,
)
def test_wrong_words_are_answered_with_what_to_do(
    run_folder: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    common = ["--fileroot", run_folder, "--output-path", tmp_path / "out", "--cache-dir", tmp_path / "cache"]
    done = clusterkit("eval", *common, *words, cwd=tmp_path, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_refused_evaluation_leaves_what_was_there(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    for name in ("eval.lock", "index.html", "logs/earlier.log"):
        (out / name).write_text("earlier")
    there = sorted(out.rglob("*"))
    words = ["--fileroot", run_folder, "--output-path", out, "--data-names", "math500"]
    clusterkit("eval", *words, "--cache-dir", tmp_path / "cache", cwd=tmp_path, code=2)
    assert sorted(out.rglob("*")) == there


def test_a_second_evaluation_into_the_same_folder_is_refused(run_folder: Path, tmp_path: Path) -> None:
    with output_lock(tmp_path / "out"):
        words = ["--fileroot", run_folder, "--output-path", tmp_path / "out", "--cache-dir", tmp_path / "cache"]
        done = clusterkit("eval", *words, cwd=tmp_path, code=2)
        assert lock_holder(tmp_path / "out" / "eval.lock") == f"process {os.getpid()}"
    assert "another evaluation (process" in done.stderr
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["eval.lock"]


def test_what_an_evaluation_was_asked_is_kept_with_its_answers(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge may refuse after hours: a stand-in, as none is there."""
    config = recall_config(Path(choose_checkpoint(None, run_folder)), tmp_path / "out")

    def refused(_: object, __: Path, feed: Callable[[bytes], None], ___: object) -> int:
        (tmp_path / "out" / "records" / "row").mkdir(parents=True)
        (tmp_path / "out" / "records" / "row" / "samples.jsonl").write_text("an answer")
        feed(b"error: the judge asks for a key\n")
        return 2

    monkeypatch.setattr(process, "run_node", refused)
    with pytest.raises(UserError, match="asks for a key"):
        process.run_evaluation(config, lambda _: None)
    assert [path.suffix for path in sorted((tmp_path / "out" / "logs").iterdir())] == [".log", ".yaml"]


def test_what_is_meant_by_a_model_path(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = choose_checkpoint(None, run_folder)
    assert choose_checkpoint("tiny-recall/run1", run_folder) == newest
    assert choose_checkpoint(str(Path(newest).parent), tmp_path) == newest
    assert choose_checkpoint("smollm2-135m", run_folder) == "smollm2-135m"
    run = run_of(Path(newest))
    assert run is not None
    assert (run.experiment, run.trial) == ("tiny-recall", "run1")
    assert run_of(tmp_path) is None
    with pytest.raises(UserError, match="clusterkit train --preset tiny"):
        choose_checkpoint(None, tmp_path)


def test_a_preset_gives_the_agent_of_a_checkpoint_from_elsewhere(tmp_path: Path) -> None:
    words = ["--model-path", "smollm2-135m", "--preset", "135M_cpu", "--data-names", "ruler_hqa@50"]
    done = clusterkit("eval", *words, "--set", "agent.max_memory_tokens=32", "--dry-run", "--json", cwd=tmp_path)
    config = EvalConfig.model_validate(json.loads(done.stdout))
    assert (config.agent.chunk_tokens, config.agent.max_memory_tokens) == (512, 32)
    assert not (tmp_path / "eval").exists()
    assert config.free_limits == []
    unknown = clusterkit("eval", *words[:2], *words[4:], "--dry-run", "--json", cwd=tmp_path)
    assert EvalConfig.model_validate(json.loads(unknown.stdout)).free_limits == [*LIMITS]
    with pytest.raises(UserError, match="chunk_tokens=0"):
        make_request({"model_path": "m", "output_path": "o", "data_names": ["recall"]}, None, ["agent.chunk_tokens=0"])


def test_a_checkpoint_from_elsewhere_reads_with_lengths_that_its_context_window_has_room_for(tmp_path: Path) -> None:
    model = chat_checkpoint(tmp_path / "model", window=2048)
    problems = problems_file(tmp_path)
    words = [
        "eval",
        "--model-path",
        model,
        "--output-path",
        tmp_path / "out",
        "--num-questions",
        "1",
        "--n-sampling",
        "0",
        "--cache-dir",
        tmp_path / "cache",
        "--max-gen-tokens",
        "4",
    ]
    words += ["--set", "agent.max_memory_tokens=16", "--set", "agent.max_final_tokens=16"]

    both = ["--data-names", f"recall@1,{problems}"]

    done = clusterkit(*words, *both, cwd=tmp_path)

    assert (
        "at most 512 tokens, the memory 16 and an answer 16, which its context window of 2048 has room for"
        in done.stderr
    )
    (result,) = (tmp_path / "out").glob("model-*/results.json")
    results = json.loads(result.read_text(encoding="utf-8"))
    assert results["config"]["agent"]["chunk_tokens"] == 512
    document, problem = (row["inputs"] for row in results["rows"])
    assert document["agent"]["chunk_tokens"] == 512
    assert "agent" not in problem
    again = clusterkit(*words, *both, cwd=tmp_path)
    assert "nothing is asked again" in again.stderr
    assert "nothing here says" not in clusterkit(*words, "--data-names", problems, cwd=tmp_path).stderr
    refused = clusterkit(*words, *both, "--set", "agent.chunk_tokens=5000", code=2, cwd=tmp_path)
    assert "lower agent.chunk_tokens" in refused.stderr


def test_a_checkpoint_is_asked_in_the_words_of_a_file(tmp_path: Path) -> None:
    model = chat_checkpoint(tmp_path / "model")
    wording = tmp_path / "words.yaml"
    wording.write_text(
        "update: |\n  Q {problem} M {memory} S {section}\n  Memory:\nfinal: |-\n  Q {problem} M {memory} A\n"
    )
    limits = {"chunk_tokens": 100, "max_question_tokens": 20, "max_memory_tokens": 10, "max_final_tokens": 10}
    words = ["eval", "--model-path", model, "--output-path", tmp_path / "out", "--data-names", "recall@2"]
    words += ["--num-questions", "1", "--n-sampling", "0", "--cache-dir", tmp_path / "cache"]
    for key, value in {**limits, "template_file": wording.name}.items():
        words += ["--set", f"agent.{key}={value}"]

    clusterkit(*words, cwd=tmp_path)
    shown = clusterkit("eval", "show", tmp_path / "out", "--question", "1", cwd=tmp_path).stdout

    assert re.search(r"--- prompt\n\[user\]Q \w+ M .+ A\[end\]\[assistant\]", shown)
    (record,) = (tmp_path / "out" / "records").glob("*/inputs.json")
    first = json.loads(record.read_text(encoding="utf-8"))["first_prompt"]
    assert re.fullmatch(r"\[user\]Q \w+ M No previous memory S .+\nMemory:\n\[end\]\[assistant\]", first)

    wording.unlink()
    refused = clusterkit(*words, cwd=tmp_path, code=2)
    assert (
        f"agent.template_file={wording} cannot be read: No such file or directory: name a YAML file" in refused.stderr
    )
    train = ["train", "--preset", "135M_cpu", "--task", "hotpotqa", f"agent.template_file={wording}", "--dry-run"]
    assert f"agent.template_file={wording} cannot be read" in clusterkit(*train, cwd=tmp_path, code=2).stderr
    assert list(tmp_path.glob("runs")) == []


def test_an_evaluation_at_work_is_listed_and_stopped(run_folder: Path, tmp_path: Path) -> None:
    words = ["eval", "--here", "--fileroot", run_folder, "--output-path", "out", "--data-names", "recall@64"]
    argv = [sys.executable, "-m", "clusterkit.cli.main", *map(str, words), "--num-questions", "1000"]
    stop = ["eval", "stop", "--here", "--output-path", "out"]
    assert "no evaluation of this machine writes into" in clusterkit(*stop, cwd=tmp_path, code=1).stderr
    with subprocess.Popen(argv, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as evaluation:
        wait_for(lambda: lock_holder(tmp_path / "out" / "eval.lock"))
        (job,) = json.loads(clusterkit("jobs", "--here", "--json", cwd=tmp_path).stdout)
        assert (job["trial"], job["status"], job["user"]) == ("out", "RUNNING", user_name())
        assert "--user" in clusterkit(*stop, "--user", "ada", cwd=tmp_path, code=2).stderr
        stopped = clusterkit(*stop, cwd=tmp_path).stdout
        assert stopped.startswith(f"{job['submission_id']} is stopped: what is answered is written")
        assert "the same command goes on" in evaluation.communicate(timeout=300)[1]
    assert evaluation.returncode == 130


def test_slurm_does_not_evaluate_and_says_what_does(tmp_path: Path) -> None:
    said = clusterkit("eval", "--slurm", "--data-names", "recall", "--dry-run", cwd=tmp_path, code=2).stderr
    assert said.startswith("error: evaluations do not run as jobs on Slurm: ")
    assert "sbatch" in said
