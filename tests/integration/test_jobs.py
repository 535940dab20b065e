"""`clusterkit jobs` of this machine: what its processes work on, by the locks that they hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.runs.directory import user_name

HOLDER = """\
import sys
from contextlib import ExitStack
from pathlib import Path
from trainer.locks import hold
with ExitStack() as stack:
    for name in sys.argv[1:]:
        hold(stack.enter_context(Path(name).open("a+b")))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("CLUSTERKIT_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def holding(*locks: Path) -> Iterator[int]:
    """A process that holds files as the trainer and evaluations do, for the length of a block; its number."""
    command = [sys.executable, "-c", HOLDER, *map(str, locks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid


def jobs(*words: str) -> tuple[list[dict[str, Any]], str]:
    done = CliRunner().invoke(app, ["jobs", "--here", "--json", *words])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_runs_and_evaluations_at_work_are_listed(machine: Path) -> None:
    run = RunWriter(machine / "runs").config().attempt().steps(1, 2).run
    RunWriter(machine / "runs", trial="ended").config().attempt().finish()
    (machine / "scores").mkdir()
    with holding(run.logs / "launch.lock", machine / "scores" / "eval.lock") as process:
        listed, said = jobs()
        shown = CliRunner().invoke(app, ["jobs"]).stdout
    assert said == ""
    by_run = {job["experiment"]: job for job in listed}
    assert set(by_run) == {"tiny-recall", "eval"}
    training, evaluation = by_run["tiny-recall"], by_run["eval"]
    assert training["submission_id"] == evaluation["submission_id"] == f"process {process}"
    assert (training["status"], training["user"]) == ("RUNNING", user_name())
    assert (training["trial"], training["run_dir"]) == ("run1", str(run.logs))
    assert training["started"] == pytest.approx((run.logs / "launch.lock").stat().st_mtime)
    assert (evaluation["trial"], evaluation["run_dir"], evaluation["ended"]) == ("scores", None, None)
    assert f"process {process}" in shown
    assert "running  tiny-recall/run1" in shown
    assert jobs() == ([], ""), "their processes have ended"


def test_a_run_is_named_by_its_trainer_as_status_names_it(machine: Path) -> None:
    run = RunWriter(machine / "runs").config().attempt().steps(1, 2).run
    command, trainer = run.logs / "launch.lock", run.logs / "run.lock"
    with holding(command) as launcher:
        assert [job["submission_id"] for job in jobs()[0]] == [f"process {launcher}"], (
            "it is about to start the trainer"
        )
        os.utime(command, (1000, 1000))
        with holding(trainer) as process:
            (job,), _ = jobs()
            assert f"running (process {process})" in CliRunner().invoke(app, ["status", "--here"]).stdout
    assert (job["submission_id"], job["started"]) == (f"process {process}", 1000)


def test_runs_of_others_are_counted_and_listed_by_their_name(machine: Path) -> None:
    logs = machine / "elsewhere" / "logs" / "ada" / "memory" / "run1"
    logs.mkdir(parents=True)
    with holding(logs / "run.lock"):
        listed, said = jobs("--fileroot", "elsewhere")
        assert (listed, said) == ([], "of others: ada (1); --user NAME\n")
        (job,), _ = jobs("--fileroot", "elsewhere", "--user", "ada")
        assert (job["user"], job["experiment"], job["trial"]) == ("ada", "memory", "run1")
        assert jobs()[0] == [], "another folder of runs"
