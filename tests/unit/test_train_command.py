"""The commands that are printed to go on with a run: a shell understands them, and they mean that run."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_writer import RunWriter
from typer.testing import CliRunner

from clusterkit.cli.main import app
from clusterkit.common.origin import masked
from clusterkit.runs.log.metrics import read_history
from clusterkit.runs.train_command import again_command, further_command, recorded_command


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLUSTERKIT_CONFIG", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def started(root: Path, command: object, trial: str = "run1") -> RunWriter:
    """A run whose newest attempt has recorded a command; it was killed after step 5."""
    writer = RunWriter(root, trial=trial).config().attempt().steps(1, 2).finish("interrupted", 2)
    return writer.attempt(2).record("attempt", command=command, resume_step=2, total_steps=30).steps(3, 5).recover(5)


def recorded(writer: RunWriter, cluster: str | None = None) -> str:
    return recorded_command(read_history(writer.run.metrics), writer.run, cluster)


def status(*words: str) -> list[str]:
    return CliRunner().invoke(app, ["status", *words]).stdout.splitlines()


def test_what_to_type_next_is_a_command_a_shell_understands() -> None:
    typed = ["train", "--preset", "tiny", "task.path=/my data", "recover_mode=disabled", "train.total_steps=30"]

    assert again_command(typed) == "clusterkit train --preset tiny 'task.path=/my data' train.total_steps=30"
    assert further_command(typed, "run3", 60) == (
        "clusterkit train --preset tiny 'task.path=/my data' trial_name=run3 train.total_steps=60"
    )
    twice = ["train", "seed=1", "--sweep", "seed=1,2", "--sweep", "seed=3,4", "--set=seed=2", "user=seed=1", "seed=3"]
    assert again_command(twice) == "clusterkit train --sweep seed=1,2 --sweep seed=3,4 user=seed=1 seed=3"
    assert again_command(["train", "--set=seed=2", "--set", "recover_mode=disabled"]) == "clusterkit train seed=2"
    assert (
        further_command(["train", "--set=trial_name=a"], "a", 9) == "clusterkit train trial_name=a train.total_steps=9"
    )


@pytest.mark.parametrize(
    ("typed", "again"),
    [
        ("train --preset tiny seed=5", "train --preset tiny seed=5 trial_name=run1"),
        ("train recover_mode=disabled --set=seed=5", "train seed=5 trial_name=run1"),
        ("train 'task.path=/my data' trial_name=run1", "train 'task.path=/my data' trial_name=run1"),
        ("train --preset tiny --fileroot runs trial_name=run1", "train --preset tiny --fileroot runs trial_name=run1"),
        ("train --preset tiny --sweep seed=1,2", "train --preset tiny --sweep seed=1,2"),
        ("setup --hostnames h1 h2 --preset tiny", "setup --hostnames h1 h2 --preset tiny"),
    ],
)
def test_the_recorded_command_goes_on_with_that_run(machine: Path, typed: str, again: str) -> None:
    assert recorded(started(machine, f"clusterkit {typed}")) == f"clusterkit {again}"


@pytest.mark.parametrize("status", ["", "interrupted"])
def test_a_run_that_ended_in_its_warm_up_has_recorded_its_command(machine: Path, status: str) -> None:
    writer = started(machine, "clusterkit train --preset tiny trial_name=run1 seed=1")
    command = "clusterkit train --preset tiny trial_name=run1"
    writer.record("start", command=command, attempt=3).record("warmup", phase="sft", step=4, steps=9, attempt=3)
    if status:  # else it was killed
        writer.record("finish", status=status, global_step=0, message="", command=command, attempt=3)

    assert recorded(writer) == command


def test_a_run_of_another_folder_is_named_with_it(tmp_path: Path) -> None:
    elsewhere = tmp_path / "my runs"
    named = f"--fileroot '{elsewhere}'"

    unnamed = started(elsewhere, "clusterkit train trial_name=a", "a")
    relative = started(elsewhere, "clusterkit train trial_name=b --fileroot ../runs", "b")
    whole = started(elsewhere, f"clusterkit train trial_name=c 'fileroot={elsewhere}'", "c")

    assert recorded(unnamed) == f"clusterkit train trial_name=a {named}"
    assert recorded(relative) == f"clusterkit train trial_name=b --fileroot ../runs {named}"
    assert recorded(whole) == f"clusterkit train trial_name=c 'fileroot={elsewhere}'"


def test_a_run_of_a_cluster_is_named_with_it_where_needed(tmp_path: Path) -> None:
    writer = started(tmp_path / "copy", "clusterkit train --preset tiny trial_name=a", "a")
    named = started(tmp_path / "copy", "clusterkit train --preset tiny trial_name=b --cluster sea", "b")

    assert recorded(writer, "") == "clusterkit train --preset tiny trial_name=a"
    assert recorded(writer, " --cluster lab") == "clusterkit train --preset tiny trial_name=a --cluster lab"
    assert recorded(named, " --cluster lab") == "clusterkit train --preset tiny trial_name=b --cluster sea"


@pytest.mark.parametrize(
    "command",
    ["", None, 3, "clusterkit train 'torn", "python train.py", masked("clusterkit train judge.url=http://me:key@host")],
)
def test_what_cannot_be_typed_again_is_not_printed(machine: Path, command: object) -> None:
    writer = started(machine, command)

    assert recorded(writer) == ""
    assert "next         repeat the `clusterkit train` command: it goes on with this run" in status()


def test_status_prints_the_command_that_goes_on(machine: Path) -> None:
    writer = started(machine, "clusterkit train --preset tiny seed=5 recover_mode=disabled")
    again = "clusterkit train --preset tiny seed=5 trial_name=run1"
    assert f"next         {again}" in status()

    writer.finish("interrupted", 5)
    assert f"next         {again}" in status()
    assert f"go on with it {again}" in [
        " ".join(line.split()) for line in CliRunner().invoke(app, []).stdout.splitlines()
    ]

    writer.finish("failed", 5, "no space left")
    lines = status()
    assert "next         clusterkit diagnose tiny-recall/run1" in lines
    assert f"go on        {again}" in lines

    writer.finish("completed", 30)
    assert not [line for line in status() if line.startswith(("next", "go on"))]


def test_a_command_that_would_fail_again_is_not_printed_as_it_was(machine: Path) -> None:
    writer = started(machine, "clusterkit train --preset tiny seed=5").finish("failed", 5, "reward.name=f2: no such")
    again = "clusterkit train --preset tiny seed=5 trial_name=run1"
    writer.run.exit_mark(2).write_text('{"code": 2}')
    assert f"go on        put right what the state says, as it fails again unchanged; then {again}" in status()
    home = [" ".join(line.split()) for line in CliRunner().invoke(app, []).stdout.splitlines()]
    assert f"once put right {again}" in home

    writer.run.exit_mark(2).write_text('{"code": 2, "restart_s": 60.0}')
    assert f"go on        it was to be started again; where its command or job has ended, {again}" in status()
    home = [" ".join(line.split()) for line in CliRunner().invoke(app, []).stdout.splitlines()]
    assert f"go on with it {again}" in home

    writer.run.exit_mark(2).write_text('{"code": 1, "restart_s": null}')
    writer.run.console(2).write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (changed,) = [line for line in status() if line.startswith("go on")]
    assert changed.startswith(f"go on        {again} train.max_tokens_per_mb=")

    assert CliRunner().invoke(app, ["diagnose", "--apply"]).exit_code == 0
    assert f"go on        {again}" in status()


def test_a_trainer_that_was_killed_during_its_imports_has_a_command_that_goes_on(machine: Path) -> None:
    writer = RunWriter(machine, trial="run1").config()
    writer.run.exit_mark(1).parent.mkdir(parents=True)
    writer.run.exit_mark(1).write_text('{"code": -9, "command": "clusterkit train --preset tiny seed=5"}')
    assert "next         clusterkit train --preset tiny seed=5 trial_name=run1" in status()

    writer = started(machine, "clusterkit train --preset tiny seed=5", trial="run2")
    writer.run.exit_mark(3).parent.mkdir()
    writer.run.exit_mark(3).write_text('{"code": -9, "command": "clusterkit train --preset tiny eval.num_tasks=9"}')
    assert recorded(writer) == "clusterkit train --preset tiny eval.num_tasks=9 trial_name=run2"
