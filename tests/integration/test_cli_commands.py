"""The commands as a user types them: output, exit codes, messages; nothing here starts a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from run_writer import RunWriter

from clusterkit.runs.directory import hold_lock
from trainer.config import RunConfig

CLUSTERKIT = str(Path(sys.executable).with_name("clusterkit"))


# The written runs of these tests have 30 steps.
THIRTY = "train.total_steps=30"


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CLUSTERKIT, *arguments], check=False, capture_output=True, text=True, cwd=folder)


def _complete(fileroot: Path) -> RunWriter:
    return RunWriter(fileroot).config().attempt().steps(1, 30).recover(30).summary().finish()


def test_a_dry_run_prints_the_configuration_and_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    result = _run(tmp_path, "train", "--preset", "tiny", "train.total_steps=7", "--dry-run")

    assert result.returncode == 0
    config = RunConfig.model_validate(yaml.safe_load(result.stdout))  # the plan is in comments
    assert (config.preset, config.train.total_steps, config.trial_name) == ("tiny", 7, "run1")
    assert config.fileroot == str(tmp_path / "runs")
    for part in ("tiny-recall/run1 starts from the beginning", "32 tasks x 8 = 256 trajectories", "first after step 2"):
        assert part in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json(tmp_path: Path) -> None:
    result = _run(tmp_path, "train", "--preset", "tiny", "--dry-run", "--json", "--fileroot", "elsewhere", THIRTY)

    plan = json.loads(result.stdout)["plan"]
    assert (plan["steps"], plan["trajectories_per_step"], plan["course"]) == (30, 256, "new")
    assert plan["logs"].startswith(str(tmp_path / "elsewhere"))
    assert plan["tokens_per_step"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_be_resumed_and_when_it_would_end(tmp_path: Path) -> None:
    RunWriter(tmp_path).config().attempt().steps(1, 10).recover(8)

    result = _run(tmp_path, "train", "--preset", "tiny", "--dry-run", "--fileroot", str(tmp_path), THIRTY)

    assert "goes on after step 8" in result.stdout
    assert "4.0 s each so far: about 1 min 28 s to go, evaluations apart" in result.stdout


def test_a_dry_run_counts_evaluations_to_come_by_those_on_record(tmp_path: Path) -> None:
    written = RunWriter(tmp_path).config().attempt()
    written.record("eval", global_step=0, name="before", chunks=0, seconds=10.0)
    written.record("eval", global_step=0, name="before", chunks=8, seconds=50.0)
    written.steps(1, 10).record("eval", global_step=5, name="heldout", chunks=0, seconds=7.0).recover(8)
    words = ("train", "--preset", "tiny", "--dry-run", "--fileroot", str(tmp_path), THIRTY, "eval.every_steps=5")

    # 22 steps of 4 s, evaluations after steps 10, 15, 20 and 25, and the closing table.
    assert "4.0 s each so far: about 2 min 56 s to go, evaluations included" in _run(tmp_path, *words).stdout


def test_a_dry_run_warns_when_the_first_persistent_checkpoint_is_hours_away(tmp_path: Path) -> None:
    RunWriter(tmp_path).config().attempt().steps(1, 10, seconds=2000.0).recover(10)
    command = ("train", "--preset", "tiny", "--dry-run", "--json", "--fileroot", str(tmp_path), THIRTY)

    late = json.loads(_run(tmp_path, *command).stdout)["plan"]["warnings"]
    soon = json.loads(_run(tmp_path, *command, "checkpoint.save_freq_secs=3600").stdout)["plan"]["warnings"]

    assert "11 h 06 min away" in late[0]
    assert soon == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train"], ["no preset chosen", "--preset NAME", "tiny"]),
        (["train", "--preset", "tyni"], ["unknown preset 'tyni'", "Did you mean tiny?"]),
        (["train", "--preset", "tiny", "--task", "hotpotqa"], ["recall or sft, not on hotpotqa", "--preset 135M_cpu"]),
        (["train", "--preset", "tiny", "train.lr=1"], ["unknown key train.lr", "train.learning_rate"]),
        (["train", "--preset", "tiny", "seed=x"], ["seed=x", "a whole number"]),
        (["train", "--preset", "tiny", "50"], ["'50' is not of the form key=value"]),
        (["train", "--preset", "tiny", "--fileroot", "file"], ["is a file", "--fileroot"]),
        (["presets", "explain", "tiny", "train.lr"], ["did you mean train.learning_rate?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_usage_is_one_message_and_exit_code_2(tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    (tmp_path / "file").write_text("")

    result = _run(tmp_path, *arguments)

    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    # /proc takes no folders, not even from root.
    result = _run(Path("/"), "train", "--preset", "tiny", "--fileroot", "/proc/runs")

    assert (result.returncode, result.stdout) == (2, "")
    assert "cannot use /proc/runs: " in result.stderr
    assert "The disk at /proc has" in result.stderr
    assert "--fileroot FOLDER" in result.stderr


def test_a_folder_that_a_file_stands_in_the_way_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs" / "recover").mkdir(parents=True)
    (tmp_path / "runs" / "logs").write_text("")

    result = _run(tmp_path, "train", "--preset", "tiny")

    assert result.returncode == 2
    assert "logs is a file" in result.stderr


def test_a_run_with_other_settings_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config("seed=3").attempt().steps(1, 5).recover(4)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    result = _run(tmp_path, "train", "--preset", "tiny", "seed=4", "--fileroot", str(tmp_path))

    assert result.returncode == 2
    assert "seed: 3 → 4" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert writer.run.attempt_numbers() == [1]


def test_a_run_that_is_being_trained_is_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).config().attempt().steps(1, 5)
    with hold_lock(writer.run.logs / "run.lock"):
        result = _run(tmp_path, "train", "--preset", "tiny", "--fileroot", str(tmp_path))

    assert result.returncode == 2
    assert f"process {os.getpid()}" in result.stderr
    assert "clusterkit status" in result.stderr
    assert writer.run.attempt_numbers() == [1]


def test_a_named_complete_run_shows_its_closing_table_again(tmp_path: Path) -> None:
    writer = _complete(tmp_path)

    result = _run(tmp_path, "train", "--preset", "tiny", "trial_name=run1", "--fileroot", str(tmp_path), THIRTY)

    assert result.returncode == 0
    for part in ("98.0%", "64 chunks (16 x the longest trained)", "memory blanked", "0.17%", "actor/epoch1"):
        assert part in result.stdout
    assert "is complete" in result.stderr
    assert "trial_name=run1 train.total_steps=60" in result.stderr
    assert writer.run.attempt_numbers() == [1]
    page = writer.run.logs / "report.html"
    assert result.stdout.splitlines()[-1] == f"picture     {page}"
    assert "64 chunks (16 x the longest trained)" in page.read_text()
    assert "clusterkit report" not in result.stderr


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    page = _complete(tmp_path).run.logs / "report.html"
    page.mkdir()

    result = _run(tmp_path, "train", "--preset", "tiny", "trial_name=run1", "--fileroot", str(tmp_path), THIRTY)

    assert (result.returncode, "98.0%" in result.stdout, "picture" in result.stdout) == (0, True, False)
    (told,) = (line for line in result.stderr.splitlines() if line.startswith("warning: "))
    assert told.startswith(f"warning: no page was written ({page} is a folder")
    assert told.endswith(f"clusterkit report tiny-recall/run1 --fileroot {tmp_path} --out FILE writes one")
    assert "as a web page   clusterkit report tiny-recall/run1" in result.stderr


def test_a_complete_run_as_json(tmp_path: Path) -> None:
    _complete(tmp_path)

    result = _run(
        tmp_path, "train", "--preset", "tiny", "trial_name=run1", "--fileroot", str(tmp_path), "--json", THIRTY
    )

    facts = json.loads(result.stdout)
    assert (facts["status"], facts["exit_code"], facts["summary"]["chance"]) == ("completed", 0, 0.0017)


def test_presets_lists_and_explains(tmp_path: Path) -> None:
    for arguments in (["presets"], ["presets", "list"]):
        listed = _run(tmp_path, *arguments)
        assert listed.returncode == 0
        assert "tiny" in listed.stdout
        assert "135M_cpu" in listed.stdout
    names = [item["name"] for item in json.loads(_run(tmp_path, "presets", "--json").stdout)["presets"]]
    assert names[0] == "tiny"

    explained = json.loads(_run(tmp_path, "presets", "explain", "tiny", "agent.template", "--json").stdout)
    assert [(item["key"], item["value"]) for item in explained] == [("agent.template", "words")]
    shown = yaml.safe_load(_run(tmp_path, "presets", "show", "135M_cpu").stdout)
    assert shown["task"]["name"] == "hotpotqa"


def test_status_finds_the_newest_run_below_the_current_folder(tmp_path: Path) -> None:
    _complete(tmp_path / "runs")

    text = _run(tmp_path, "status")
    facts = json.loads(_run(tmp_path, "status", "--json").stdout)

    assert text.returncode == 0
    assert "finished" in text.stdout
    assert (facts["state"], facts["progress"]["global_step"]) == ("finished", 30)


@pytest.mark.parametrize(
    ("ending", "state", "code"),
    [("failed", "failed", 1), (None, "killed", 1), ("interrupted", "interrupted", 0), ("completed", "finished", 0)],
)
def test_status_has_exit_codes_and_the_diagnosis_for_scripts(
    tmp_path: Path, ending: str | None, state: str, code: int
) -> None:
    writer = RunWriter(tmp_path / "runs").config().attempt().steps(1, 2)
    writer.run.console(1).write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    if ending:
        writer.finish(ending, 2)

    plain = _run(tmp_path, "status")
    as_json = _run(tmp_path, "status", "--json")
    watched = _run(tmp_path, "status", "--watch")

    facts = json.loads(as_json.stdout)
    assert [done.returncode for done in (plain, as_json, watched)] == [code] * 3
    assert facts["state"] == state
    assert ("gpu-memory" in [finding["id"] for finding in facts["diagnosis"]]) == (code == 1)


def test_status_without_runs_fails_with_what_to_type(tmp_path: Path) -> None:
    result = _run(tmp_path, "status")

    assert (result.returncode, result.stdout) == (1, "")
    assert "no runs found under" in result.stderr
    assert "clusterkit train --preset tiny" in result.stderr


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "runs").config().attempt().steps(1, 2)
    with hold_lock(writer.run.logs / "run.lock"):
        watch = subprocess.Popen([CLUSTERKIT, "status", "--watch", "--json"], stdout=subprocess.PIPE, cwd=tmp_path)
        assert watch.stdout is not None
        assert json.loads(watch.stdout.readline())["state"] == "running"
        writer.steps(3, 3).finish("completed", 3)
    rest = [json.loads(line) for line in watch.stdout]

    assert watch.wait() == 0
    assert rest[-1]["state"] == "finished"
    assert rest[-1]["progress"]["global_step"] == 3


def test_training_without_its_packages_says_which_extra_to_install(tmp_path: Path) -> None:
    # -S leaves out site-packages: only what the operator side needs is put back, as in a plain installation.
    light = tmp_path / "light"
    light.mkdir()
    site = Path(yaml.__file__).parents[1]
    for package in site.iterdir():
        if package.name.partition(".")[0].partition("-")[0] not in ("torch", "transformers", "safetensors"):
            (light / package.name).symlink_to(package)
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": f"{light}:{repository}"}
    command = [sys.executable, "-S", "-m", "clusterkit.cli.main", "train", "--preset", "tiny"]

    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert result.returncode == 2
    assert "torch, transformers" in result.stderr
    assert "pip install 'clusterkit[train]'" in result.stderr
    assert not (tmp_path / "runs").exists()
