"""`clusterkit runs`, and `clusterkit` alone: what many runs look like together, read from the ends of their files."""

from __future__ import annotations

import errno
import json
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import Result
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.backends.words_here import words_here
from clusterkit.cli.main import app
from clusterkit.hosts import inventory
from clusterkit.hosts.model import Cluster, Host
from clusterkit.provision.ray import current
from clusterkit.provision.ray.token import local_file
from clusterkit.runs.directory import hold_lock, user_name
from clusterkit.runs.log.metrics import newest_history, read_history
from clusterkit.runs.overview import overviews
from trainer.errors import UserError


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def shown(*words: str) -> Result:
    done = CliRunner().invoke(app, ["runs", *words])
    assert done.exit_code == 0, done.output
    return done


def listed(*words: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shown(*words, "--json").stdout)
    return found


def names(*words: str) -> list[str]:
    return [run["trial"] for run in listed(*words)]


def measured(writer: RunWriter, accuracy: float, step: int) -> RunWriter:
    return writer.record("eval", name="heldout", global_step=step, chunks=0, num_tasks=128, accuracy=accuracy)


def three(root: Path) -> list[RunWriter]:
    """A run that is complete, one that failed and one that was killed, in this order of time."""
    found = []
    for place, rate in enumerate(("1e-5", "2e-5", "5e-5")):
        writer = RunWriter(root, trial=f"t{place}").config(f"train.learning_rate={rate}")
        writer.attempt().steps(1, 10 + place)
        found.append(measured(writer, (0.5, 0.9, 0.7)[place], 10))
    found[0].finish(step=10)
    found[1].finish("failed", 11, "no space left")
    return found


def test_every_run_is_shown_with_where_it_is_and_the_settings_that_differ(machine: Path) -> None:
    three(machine)
    RunWriter(machine, experiment="another").config("seed=9").attempt().steps(1, 2).finish("interrupted", 2)

    lines = shown().stdout.splitlines()

    assert lines[0].split("\t") == ["run", "state", "step", "left", "reward", "loss", "accuracy", "train.learning_rate"]
    assert "tiny-recall/t0\tfinished\t10/30\t-\t0.100\t-\t50.0%\t1e-05" in lines
    assert "tiny-recall/t1\tfailed\t11/30\t-\t0.110\t-\t90.0%\t2e-05" in lines
    assert "tiny-recall/t2\tkilled\t12/30\t-\t0.120\t-\t70.0%\t5e-05" in lines
    # Another experiment's seed is no difference between runs of one.
    assert "another/run1\tinterrupted\t2/30\t-\t0.020\t-\t-\t0.0001" in lines
    failed = listed("--state", "failed")[0]
    assert (failed["global_step"], failed["total_steps"], failed["accuracy"]) == (11, 30, 0.9)
    assert failed["message"] == "no space left"
    assert shown().stderr == "why tiny-recall/t2 is killed: clusterkit diagnose tiny-recall/t2\n"


def test_runs_are_chosen_by_state_name_and_settings(machine: Path) -> None:
    three(machine)

    assert names("--state", "finished,killed") == ["t0", "t2"]
    assert names("--trial", "t[12]") == ["t1", "t2"]
    assert names("train.learning_rate=0.00002") == ["t1"]
    assert names("--last", "2") == ["t1", "t2"]
    assert names("--experiment", "other-*") == []
    assert "no such runs" in shown("seed=77").stdout
    assert "no runs of" in shown("--fileroot", "elsewhere").stdout


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("accuracy", ["t1", "t2", "t0"]),
        ("reward", ["t2", "t1", "t0"]),
        ("name", ["t0", "t1", "t2"]),
        ("state", ["t1", "t0", "t2"]),
        ("train.learning_rate", ["t0", "t1", "t2"]),
        ("time", ["t0", "t1", "t2"]),
    ],
)
def test_runs_are_sorted(machine: Path, sort: str, expected: list[str]) -> None:
    three(machine)

    assert names("--sort", sort) == expected
    assert names("--sort", sort, "--reverse") == expected[::-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sort", "acuracy"], r"step, reward, accuracy \(or F1, or score\), loss, or a setting"),
        (["--state", "runing"], "Did you mean running?"),
        (["train.lerning_rate=1"], "did you mean train.learning_rate"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        CliRunner().invoke(app, ["runs", *words], catch_exceptions=False)


def test_damaged_folders_are_told_and_hide_no_other_run(machine: Path) -> None:
    three(machine)
    logs = machine / "logs" / RunWriter(machine, trial="broken").run.user / "tiny-recall"
    (logs / "broken" / "metrics.jsonl").mkdir()
    (logs / "binary").mkdir()
    (logs / "binary" / "metrics.jsonl").write_bytes(b"\x00\xff{\n" * 9)
    (logs / "binary" / "config.yaml").write_text("{[")
    (logs / "a-file").write_text("")

    done = shown()

    assert {"tiny-recall/t0", "tiny-recall/t1", "tiny-recall/t2"} < {
        line.split()[0] for line in done.stdout.splitlines()
    }
    assert (
        f"note: tiny-recall/broken: {logs / 'broken' / 'metrics.jsonl'} cannot be read: Is a directory" in done.stderr
    )
    assert f"{logs / 'binary' / 'config.yaml'} is damaged (it is not YAML, or cut off)" in done.stderr
    assert f"{logs / 'binary' / 'metrics.jsonl'} has no readable record" in done.stderr
    assert [run["state"] for run in listed("--trial", "broken")] == ["unreadable"]


def test_a_run_at_work_has_the_time_that_is_left(machine: Path) -> None:
    writer = three(machine)[2]
    with hold_lock(writer.run.logs / "run.lock"):
        (run,) = listed("--state", "running,stalled")
        assert "left" in shown().stdout.splitlines()[0]
    assert run["trial"] == "t2"
    assert 0 < run["eta_s"] <= 18 * 4.0


@pytest.mark.parametrize("steps", [10, 2000])
def test_the_time_that_is_left_is_that_of_status_closing_evaluation_included(machine: Path, steps: int) -> None:
    writer = RunWriter(machine).config().attempt(total_steps=steps + 2)
    before = [{"chunks": chunks, "seconds": 600.0} for chunks in (0, 64)]
    for line in before:
        writer.record("eval", name="before", global_step=0, **line)
    writer.run.before.write_text(json.dumps(before))
    writer.steps(1, steps, total_steps=steps + 2)

    def told() -> tuple[str, str]:
        table = dict(zip(*(line.split("\t") for line in shown().stdout.splitlines()), strict=True))
        status = CliRunner().invoke(app, ["status", "--here"]).stdout
        return table["left"], next(line for line in status.splitlines() if line.startswith("step "))

    with hold_lock(writer.run.logs / "run.lock"):
        assert (writer.run.metrics.stat().st_size > 1 << 19) is (steps > 10), "the records of `before` are not read"
        left, step = told()
        assert (left, step.endswith(f"ETA {left}, closing evaluation included")) == ("20 min 08 s", True)
        assert listed()[0]["left_s"] - listed()[0]["eta_s"] == 1200.0
        writer.steps(steps + 1, steps + 2, total_steps=steps + 2)
        writer.record("eval", name="after", global_step=steps + 2, chunks=0)
        assert told()[0] == "10 min"
        writer.record("eval", name="after", global_step=steps + 2, chunks=64)
        left, step = told()
        assert (left, "ETA" in step) == ("-", False)


def test_runs_of_others_are_counted_and_listed_by_their_name(machine: Path) -> None:
    three(machine)
    for trial in ("a", "b"):
        (machine / "logs" / "ada" / "memory" / trial).mkdir(parents=True)

    assert "of others: ada (2); --user NAME\n" in shown().stderr
    assert names("--user", "ada") == ["a", "b"]
    assert "of others" not in shown("--user", "ada").stderr


def test_a_pipe_gets_a_line_a_run_with_tabs_and_every_setting(machine: Path) -> None:
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip", "min_lr_ratio", "threads", "seed")
    keys = ["seed" if name == "seed" else f"train.{name}" for name in names]
    for trial, value in (("a", 1), ("b", 2)):
        settings = [f"{key}={value if key in ('seed', 'train.threads') else value / 10}" for key in keys]
        RunWriter(machine, trial=trial).config(*settings).attempt().steps(1, 3).finish()

    head, *rows = (line.split("\t") for line in shown().stdout.splitlines())

    assert head[:3] == ["run", "state", "step"]
    assert sorted(head[-len(keys) :]) == sorted(keys)
    assert [row[0] for row in rows] == ["tiny-recall/a", "tiny-recall/b"]
    assert {len(row) for row in rows} == {len(head)}
    assert "more settings differ" not in shown().stderr


@pytest.mark.parametrize("width", [60, 40])
def test_the_table_fits_the_terminal(machine: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr("clusterkit.cli.actions.runs.terminal_width", lambda: width)
    for rate in ("1e-5", "2e-5"):
        writer = RunWriter(machine, trial=f"learning_rate-{rate}_seed-1").config(f"train.learning_rate={rate}")
        measured(writer.attempt().steps(1, 3), 0.5, 3).finish()

    lines = shown().stdout.splitlines()

    assert max(map(len, lines)) <= width
    for part in ("tiny-recall/learning_rate-1e-5_seed-1", "finished", "train.learning_rate=1e-05"):
        assert any(part in line for line in lines)


def test_of_a_file_of_gigabytes_only_the_end_is_read(machine: Path) -> None:
    writer = RunWriter(machine).config().attempt()
    with writer.run.metrics.open("r+b") as file:  # what lies before was never written, so it takes no disk
        file.truncate(20 << 30)
        file.seek(0, 2)
        file.write(b"\n")
    measured(writer, 0.25, 3).steps(4, 1500).recover(1500)

    began = time.monotonic()
    (run,) = overviews(machine)

    assert time.monotonic() - began < 5.0
    assert (run.global_step, run.reward, run.accuracy) == (1500, 15.0, 0.25)


def test_the_end_tells_what_the_whole_file_tells(machine: Path) -> None:
    """Also where a restart took steps back, and where a step is longer than what is read at first."""
    writer = RunWriter(machine).config().attempt()
    measured(writer.steps(1, 40), 0.5, 40).steps(41, 900)
    measured(writer, 0.9, 900)
    writer.attempt(resume_step=850).steps(851, 853)
    whole, (end, damaged) = read_history(writer.run.metrics), newest_history(writer.run.metrics)

    assert damaged == 0
    assert (end.global_step, end.total_steps) == (whole.global_step, whole.total_steps) == (853, 30)
    assert end.held_out[-1] == whole.held_out[-1] == {**end.held_out[-1], "accuracy": 0.5}

    writer.record("step", global_step=854, total_steps=30, task_ids=["x" * 100] * 3000, stats={"task_reward": 0.5})
    assert newest_history(writer.run.metrics)[0].global_step == 854


def test_two_hundred_long_runs_are_listed_in_seconds(machine: Path) -> None:
    first = RunWriter(machine, trial="t0").config().attempt().steps(1, 400)
    config, records = first.run.config.read_bytes(), first.run.metrics.read_bytes()
    for number in range(1, 200):
        logs = first.run.logs.with_name(f"t{number}")
        (logs / "attempt_1").mkdir(parents=True)
        (logs / "config.yaml").write_bytes(config)
        with (logs / "metrics.jsonl").open("wb") as file:
            file.truncate(50 << 20)
            file.seek(0, 2)
            file.write(b"\n" + records)

    began = time.process_time()
    assert len(list(overviews(machine))) == 200
    assert time.process_time() - began < 8.0


def test_alone_it_says_what_there_is_and_what_to_type(machine: Path) -> None:
    empty = CliRunner().invoke(app, [])
    assert empty.exit_code == 0
    assert "Runs under" in empty.stdout
    assert "clusterkit train --preset tiny" in empty.stdout
    assert "clusterkit setup --hostnames" in empty.stdout

    writer = three(machine)[2]
    killed = CliRunner().invoke(app, []).stdout
    assert "tiny-recall/t0  finished" in killed
    assert "clusterkit diagnose\n" in killed
    with hold_lock(writer.run.logs / "run.lock"):
        assert "clusterkit status --watch\n" in CliRunner().invoke(app, []).stdout
    writer.clock += 1
    writer.finish()
    assert "clusterkit report\n" in CliRunner().invoke(app, []).stdout


def test_alone_it_names_the_current_cluster_and_says_here_for_runs_of_this_machine(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lab", "other"):
        inventory.save(Cluster(name=name, hosts=(Host(name="h1", address="127.0.0.1", port=1),)))
    told = CliRunner().invoke(app, []).stdout
    assert "Clusters: lab, other, not set up: clusterkit setup --cluster lab" in told
    current.choose("lab")
    told = CliRunner().invoke(app, []).stdout
    assert "Cluster lab (the current one), 1 host, not set up: clusterkit setup --cluster lab" in told
    assert "commands go there" not in told
    current.forget("lab")
    for name in ("lab", "other"):
        local_file(name).parent.mkdir(parents=True)
        local_file(name).write_text("0" * 64)
    inventory.save(Cluster(name="new", hosts=(Host(name="h1", address="127.0.0.1", port=1),)))
    told = CliRunner().invoke(app, []).stdout
    assert "Clusters: lab, new (not set up), other; none is the current one: clusterkit use NAME" in told

    monkeypatch.setenv("CLUSTERKIT_CLUSTER", "lab")
    writer = RunWriter(machine).config().attempt().steps(1, 2).finish()
    told = CliRunner().invoke(app, []).stdout

    assert "Cluster lab (from $CLUSTERKIT_CLUSTER), 1 host: commands go there; this machine: --here" in told
    for command in ("status --here", "report --here", "runs --here", "runs", "ray-status"):
        assert f"clusterkit {command}\n" in told
    assert words_here(writer.run) == "tiny-recall/run1 --here"
    monkeypatch.setenv("CLUSTERKIT_CLUSTER", "gone")
    broken = CliRunner().invoke(app, [])
    assert broken.exit_code == 0
    assert "$CLUSTERKIT_CLUSTER is 'gone', and there is no such cluster" in broken.stdout


@pytest.mark.parametrize("reason", ["Permission denied", "Too many levels of symbolic links"])
def test_alone_it_names_a_folder_of_runs_that_may_not_be_read_and_shows_the_rest(
    machine: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    own = machine / "logs" / user_name()
    own.parent.mkdir(parents=True)
    if reason == "Permission denied":  # root may list everything, so the refusal is a fake
        own.mkdir()
        monkeypatch.setattr("os.scandir", Mock(side_effect=PermissionError(errno.EACCES, reason, str(own))))
    else:
        own.symlink_to(own)

    told = CliRunner().invoke(app, [])

    assert told.exit_code == 0
    assert f"Runs under {machine}: {own} may not be read: {reason}" in told.stdout
    assert "Cluster: none" in told.stdout
    assert "clusterkit runs --fileroot FOLDER\n" in told.stdout
    assert "clusterkit train" not in told.stdout


def test_alone_it_asks_no_queue(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(machine).config().attempt().steps(1, 3)
    (writer.run.logs / "slurm").mkdir()
    squeue = machine / "squeue"
    squeue.write_text(f"#!/bin/sh\n: > {machine / 'asked'}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(machine))

    assert "tiny-recall/run1  submitted  3/30" in CliRunner().invoke(app, []).stdout
    writer.finish("failed", 3, "no space left")
    for restart, state in (("60.0", "submitted"), ("null", "failed")):
        writer.run.exit_mark(1).write_text(f'{{"code": 2, "restart_s": {restart}}}')
        told = CliRunner().invoke(app, []).stdout
        assert re.search(rf"tiny-recall/run1 +{state} +3/30", told)
        assert ("once put right" in told) == (state == "failed"), "while its restart waits nothing has to be done"
    assert not (machine / "asked").exists()
    assert [run["state"] for run in listed("--slurm")] == ["failed"]
    assert (machine / "asked").exists()
