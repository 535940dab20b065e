"""Evaluations as jobs of a real Ray: followed and detached from, watched over, on GPUs that Ray hands out, stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from evalparts import recall_checkpoint, recall_config
from raycluster import RayCluster, running
from runs import wait_for

from clusterkit.runs.directory import RunDirectory, user_name
from trainer.config import RunConfig

pytestmark = pytest.mark.timeout(1200)

JOB_SECONDS = 300.0
LOOK_SECONDS = 0.2
"""Between looks at all processes or at many files, which cost what the jobs should have."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with running(gpus=1) as found:
        yield found


@pytest.fixture
def run(cluster: RayCluster, request: pytest.FixtureRequest) -> Iterator[RunDirectory]:
    """A run there with two checkpoints of random weights, laid out as the trainer does."""
    run = RunDirectory(cluster.fileroot, user_name(), "tiny-recall", request.node.name[5:15])
    recall_checkpoint(checkpoint(run, 2))
    add_checkpoint(run, 4)
    asked = recall_config(Path("x"), Path("y"))
    values: dict[str, Any] = {"agent": asked.agent.model_dump(), "task": asked.task.model_dump()}
    run.logs.mkdir(parents=True, exist_ok=True)
    run.config.write_text(yaml.safe_dump(RunConfig.model_validate(values).model_dump()))
    yield run
    cluster.stop_jobs()  # of a test that failed; they would hold the GPU
    shutil.rmtree(run.checkpoints)


def checkpoint(run: RunDirectory, step: int) -> Path:
    return run.checkpoints / "actor" / f"epoch1epochstep{step}globalstep{step}"


def add_checkpoint(run: RunDirectory, step: int) -> None:
    """Whole at once, as the trainer writes them."""
    hidden = run.checkpoints / f".{step}"
    shutil.copytree(checkpoint(run, 2), hidden)
    hidden.rename(checkpoint(run, step))


def complete(run: RunDirectory) -> None:
    run.metrics.write_text(json.dumps({"kind": "finish", "status": "completed"}) + "\n")


def named(run: RunDirectory) -> str:
    return f"{run.experiment}/{run.trial}"


def scored(folder: Path) -> list[str]:
    """Checkpoints whose results are here, by step."""
    results = [json.loads(path.read_text())["model_path"] for path in folder.glob("*/results.json")]
    return sorted(Path(path).name for path in results)


def until(cluster: RayCluster, process: Any, condition: Callable[[], object], cwd: Path) -> None:
    end = time.monotonic() + JOB_SECONDS
    while True:
        ended = process.poll() is not None  # looked at first: it may end as soon as the condition holds
        if condition():
            return
        assert not ended, (cwd / "stderr").read_text()
        assert time.monotonic() < end, f"{(cwd / 'stderr').read_text()}\n{cluster.logs()}"
        time.sleep(LOOK_SECONDS)


def test_checkpoints_of_a_run_are_scored_as_they_appear_until_it_is_complete(
    cluster: RayCluster, run: RunDirectory, tmp_path: Path
) -> None:
    words = ["eval", "--cluster", "c", "--watch", named(run), "--num-questions", "2", "--output-path", "watched"]
    process = cluster.start(*words, cwd=tmp_path)
    here = tmp_path / "watched" / "c"
    until(cluster, process, lambda: len(scored(here)) == 2, tmp_path)
    add_checkpoint(run, 12)
    until(cluster, process, lambda: len(scored(here)) == 3, tmp_path)
    complete(run)
    assert process.wait(timeout=JOB_SECONDS) == 0
    said = (tmp_path / "stderr").read_text()
    assert "scoring epoch1epochstep2globalstep2" in said
    assert "3 checkpoints are scored" in said
    page = (here / "index.html").read_text()
    assert "greedy_acc, training steps 12:" in page
    assert (tmp_path / "stdout").read_text().count("recall") == 3
    listed = json.loads(cluster("jobs", "--cluster", "c", "--json", cwd=tmp_path).stdout)
    (job,) = (job for job in listed if job["trial"] == "watched")
    assert (job["status"], job["user"], job["experiment"], job["run_dir"]) == ("SUCCEEDED", user_name(), "eval", None)
    assert job["started"] < job["ended"]
    assert json.loads(cluster("jobs", "--cluster", "c", "--alive", "--json", cwd=tmp_path).stdout) == []

    # The numbers are with the run: its report there has the curve, whoever asked for the scores.
    report = cluster("report", "--cluster", "c", "--trial", run.trial, "--out", "-", cwd=tmp_path).stdout
    assert "Scores of its checkpoints" in report
    assert "greedy_acc, training steps 12:" in report

    again = cluster(*words, "--once", "--json", cwd=tmp_path)
    lines = [json.loads(line) for line in again.stdout.splitlines()]
    assert [Path(one["model_path"]).name[-1] for one in lines] == ["2", "4", "2"]
    assert "every answer is in the record" in again.stderr


@pytest.mark.long
def test_gpus_are_held_only_while_something_is_scored(cluster: RayCluster, run: RunDirectory, tmp_path: Path) -> None:
    """Ray only believes in its GPU, so the embedded engine answers; what is shown is who asks Ray for it, and when."""
    words = ["eval", "--cluster", "c", "--watch", named(run), "--gpus", "1", "--engine", "embedded"]
    words += ["--num-questions", "2", "--output-path", "on-gpus"]
    process = cluster.start(*words, cwd=tmp_path)
    until(cluster, process, lambda: len(scored(tmp_path / "on-gpus" / "c")) == 2, tmp_path)
    # The watch goes on, and another evaluation gets the GPU.
    other = ["eval", "--cluster", "c", "--model-path", named(run), "--gpus", "1", "--engine", "embedded"]
    cluster(*other, "--num-questions", "2", "--output-path", "other", cwd=tmp_path)
    assert process.poll() is None
    stopped = cluster("eval", "stop", "--cluster", "c", "--output-path", "on-gpus", cwd=tmp_path)
    assert "is stopped" in stopped.stdout
    assert process.wait(timeout=JOB_SECONDS) == 130
    assert "the watch was stopped" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("gpus", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_watch_that_is_stopped_ends_what_it_scores(
    cluster: RayCluster, run: RunDirectory, tmp_path: Path, gpus: int
) -> None:
    words = ["eval", "--cluster", "c", "--watch", named(run), "--data-names", "recall@64", "--num-questions", "4000"]
    words += ["--gpus", str(gpus), "--engine", "embedded", "--output-path", f"long{gpus}", "--detach"]
    cluster(*words, cwd=tmp_path)
    wait_for(lambda: evaluations(f"long{gpus}"), JOB_SECONDS, LOOK_SECONDS)
    stopped = cluster("eval", "stop", "--cluster", "c", "--output-path", f"long{gpus}", cwd=tmp_path)
    assert "is stopped" in stopped.stdout
    wait_for(lambda: not evaluations(f"long{gpus}"), JOB_SECONDS, LOOK_SECONDS)


def evaluations(output: str) -> list[psutil.Process]:
    """Processes that score a checkpoint for a watch."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:3] == ["-m", "evaluation"] and f"/{output}/logs/watch/" in words[-1]:
            found.append(process)
    return found


def test_the_scores_of_a_run_of_this_machine_come_back_to_it(
    cluster: RayCluster, run: RunDirectory, tmp_path: Path
) -> None:
    shutil.copytree(run.fileroot / "checkpoints", tmp_path / "runs" / "checkpoints")
    local = RunDirectory(tmp_path / "runs", run.user, run.experiment, "here")
    (tmp_path / "runs" / "checkpoints" / run.user / run.experiment / run.trial).rename(local.checkpoints)
    local.logs.mkdir(parents=True)
    shutil.copy(run.config, local.config)
    done = cluster(
        *("eval", "--cluster", "c", "--model-path", named(local), "--num-questions", "2", "--output-path", "mine"),
        cwd=tmp_path,
    )
    assert "copying model" in done.stderr
    (kept,) = (local.logs / "scores").glob("*.json")
    assert json.loads(kept.read_text())["model_path"] == str(checkpoint(local, 4))
    assert "recall" in cluster("report", "--trial", "here", "--out", "-", cwd=tmp_path).stdout


@pytest.mark.long
def test_ctrl_c_of_a_followed_evaluation_leaves_it_running_and_says_how_to_come_back(
    cluster: RayCluster, run: RunDirectory, tmp_path: Path
) -> None:
    words = ["eval", "--cluster", "c", "--model-path", named(run), "--data-names", "recall@64"]
    words += ["--num-questions", "4000", "--output-path", "long"]
    process = cluster.start(*words, cwd=tmp_path)
    until(cluster, process, lambda: "answers, " in (tmp_path / "stderr").read_text(), tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 0
    said = (tmp_path / "stderr").read_text()
    assert "detached: it goes on, as job " in said
    assert "the same command again" in said
    assert "clusterkit eval stop --cluster c --out long" in said
    assert "Traceback" not in said

    job = said.partition("it runs, as job ")[2].partition(".")[0]
    again = cluster.start(*words, cwd=tmp_path)
    until(cluster, again, lambda: f"it runs already, as job {job}" in (tmp_path / "stderr").read_text(), tmp_path)
    stopped = cluster("eval", "stop", "--cluster", "c", "--output-path", "long", cwd=tmp_path)
    assert f"{job} is stopped" in stopped.stdout
    assert again.wait(timeout=300) == 130


def test_ctrl_c_while_something_is_copied_leaves_what_is_there(cluster: RayCluster, tmp_path: Path) -> None:
    model = recall_checkpoint(tmp_path / "large")
    with (model / "more.bin").open("wb") as file:
        file.truncate(3 << 30)  # a hole, which takes long enough to read and to send
    words = ["eval", "--cluster", "c", "--model-path", model, "--data-names", "recall", "--preset", "tiny"]
    process = cluster.start(*words, cwd=tmp_path)
    until(cluster, process, lambda: "copying model" in (tmp_path / "stderr").read_text(), tmp_path)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert "interrupted: what is copied stays there" in (tmp_path / "stderr").read_text()
    assert not (cluster.storage / "models" / "large").exists()
    (model / "more.bin").unlink()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--watch", "nobody/nothing"], "has no such run"),
        (["--watch", "/elsewhere"], "with --cluster name a run there, as EXPERIMENT/TRIAL"),
        (["--watch", "a/b", "--model-path", "a/b"], "leave --model-path out"),
    ],
)
def test_what_cannot_be_watched(cluster: RayCluster, tmp_path: Path, words: list[str], message: str) -> None:
    assert message in cluster("eval", "--cluster", "c", *words, cwd=tmp_path, code=2).stderr
