"""`clusterkit diagnose`, from a failed run to the command that goes on with a changed setting."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from commandline import run_clusterkit
from run_writer import RunWriter

from clusterkit.backends.local.train import follow, prepared
from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import hold_lock
from clusterkit.ui.progress import showing

OUT_OF_MEMORY = """Traceback (most recent call last):
  File "/code/trainer/loop.py", line 133, in _step
    batch, stats = self._learn(groups, number)
  File "/code/trainer/train/learner.py", line 90, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def _failed(root: Path, message: str = OUT_OF_MEMORY, *overrides: str) -> RunWriter:
    writer = RunWriter(root).config(*overrides).attempt().steps(1, 4).recover(3)
    writer.run.console(1).write_text(message)
    return writer.finish("failed", 4, message.strip().splitlines()[-1])


def _dry(command: str) -> tuple[dict[str, object], str]:
    done = run_clusterkit(*shlex.split(command)[1:], "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["config"]["train"], done.stderr


def test_what_to_change_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    writer = _failed(tmp_path)
    done = run_clusterkit("diagnose", "--fileroot", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "GPU memory ran out while training (actor_train)" in done.stdout
    assert "train.max_tokens_per_mb: 16384 → 8192" in done.stdout
    assert "--apply" in done.stdout
    assert not (writer.run.logs / "overrides.yaml").exists()


def test_an_applied_change_is_taken_by_the_same_command(tmp_path: Path) -> None:
    same = f"clusterkit train --preset tiny --fileroot {tmp_path} trial_name=run1"
    writer = _failed(tmp_path)
    applied = run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply", "--json")
    assert applied.returncode == 0, applied.stderr
    answer = json.loads(applied.stdout)
    [written] = answer["overrides"]
    assert (written["key"], written["was"], written["now"]) == ("train.max_tokens_per_mb", 16384, 8192)
    assert yaml.safe_load(Path(answer["file"]).read_text())["train.max_tokens_per_mb"]["now"] == 8192
    for command in (same, answer["command"]):
        config, notes = _dry(command)
        assert config["max_tokens_per_mb"] == 8192
        assert "instead of 16384" in notes
    # A value that is typed on purpose wins, and the user is told.
    config, notes = _dry(f"{same} train.max_tokens_per_mb=4096")
    assert config["max_tokens_per_mb"] == 4096
    assert "as typed" in notes
    assert "applied already" in run_clusterkit("diagnose", "--fileroot", str(tmp_path)).stdout
    # The next attempt ran with it and failed again: it is halved once more, still for the command as it was typed.
    values = yaml.safe_load(writer.run.config.read_text())
    values["train"]["max_tokens_per_mb"] = 8192
    writer.run.config.write_text(yaml.safe_dump(values))
    assert run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply").returncode == 0
    assert _dry(same)[0]["max_tokens_per_mb"] == 4096
    (writer.run.logs / "overrides.yaml").unlink()
    assert _dry(same)[0]["max_tokens_per_mb"] == 16384


def test_the_rebuilt_command_means_the_samerun_clusterkit(tmp_path: Path) -> None:
    overrides = ("train.learning_rate=0.0002", "eval.final_chunks=[2, 4]", "seed=7", "algorithm.clip_high=0.3")
    writer = _failed(tmp_path, OUT_OF_MEMORY, *overrides)
    command = json.loads(run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply", "--json").stdout)["command"]
    done = run_clusterkit(*shlex.split(command)[1:], "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    before = yaml.safe_load(writer.run.config.read_text())
    after = answer["config"]
    assert after["train"].pop("max_tokens_per_mb") == 8192
    before["train"].pop("max_tokens_per_mb")
    for values in (before, after):
        values.pop("fileroot")
    assert after == before
    assert (answer["plan"]["course"], answer["plan"]["resume_step"]) == ("resume", 3)


def test_a_setting_that_must_stay_is_for_a_new_trial_only(tmp_path: Path) -> None:
    writer = _failed(tmp_path, "RuntimeError: CUDA error: an illegal memory access was encountered\n")
    shown = run_clusterkit("diagnose", "--fileroot", str(tmp_path)).stdout
    assert "rollout.batch_size: 32 → 16 (needs a new trial" in shown
    [line] = [line for line in shown.splitlines() if "For a new trial: " in line]
    command = line.partition("For a new trial: ")[2]
    assert "trial_name=run1-2" in command
    done = run_clusterkit(*shlex.split(command)[1:], "--dry-run", "--json")
    assert json.loads(done.stdout)["config"]["rollout"]["batch_size"] == 16, done.stderr
    refused = run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply")
    assert refused.returncode == 1
    assert "new trial" in refused.stderr
    assert not (writer.run.logs / "overrides.yaml").exists()


def test_nothing_is_applied_to_a_run_that_is_alive(tmp_path: Path) -> None:
    writer = _failed(tmp_path)
    with hold_lock(writer.run.logs / "run.lock"):
        refused = run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply")
    assert refused.returncode == 1
    assert "Stop it first" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "stats", "changes"),
    [
        (["rollout.share_prefixes=false"], {"cached_share": 0.1}, ["rollout.share_prefixes=true"]),
        (
            ["agent.prompt_order=paper"],
            {"cached_share": 0.2, "judge_share": 0.4},
            ["rollout.max_staleness=2", "agent.prompt_order=section_first"],
        ),
    ],
    ids=["may change", "must stay, and alternatives"],
)
def test_the_changes_of_a_complete_run_are_for_a_new_trial(
    tmp_path: Path, settings: list[str], stats: dict[str, float], changes: list[str]
) -> None:
    writer = RunWriter(tmp_path).config("servers.engine=vllm", *settings).attempt()
    possible = 0.23 if "judge_share" in stats else 0.75
    writer.steps(1, 8, shareable_share=possible, **stats).recover(8).finish("completed", 8)
    shown = run_clusterkit("diagnose", "--fileroot", str(tmp_path)).stdout
    assert "--apply" not in shown
    [line] = [line for line in shown.splitlines() if "For a new trial: " in line]
    command = line.partition("The run is complete. For a new trial: ")[2]
    assert set(changes) < set(shlex.split(command))
    assert "judge.concurrency" not in command  # for when the first change was not enough
    assert "trial_name=run1-2" in command
    refused = run_clusterkit("diagnose", "--fileroot", str(tmp_path), "--apply")
    assert refused.returncode == 1
    assert refused.stderr.partition("For a new trial: ")[2].strip() == command
    assert not (writer.run.logs / "overrides.yaml").exists()
    done = run_clusterkit(*shlex.split(command)[1:], "--dry-run", "--json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "cannot be read"),
        ("- 1", "was: VALUE"),
        ("train.max_token: {was: 1, now: 2}", "unknown key"),
        ("train.max_tokens_per_mb: {was: 16384, now: 1}", "train.max_tokens_per_mb=1"),
        ("train.learning_rate: {was: 0.0001, now: 1.0}", "must stay"),
    ],
)
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, text: str, part: str) -> None:
    writer = _failed(tmp_path)
    (writer.run.logs / "overrides.yaml").write_text(text)
    done = run_clusterkit("train", "--preset", "tiny", "--fileroot", str(tmp_path), "--dry-run")
    assert done.returncode == 2
    assert part in done.stderr
    assert "overrides.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_says_why_a_run_failed(tmp_path: Path) -> None:
    _failed(tmp_path)
    shown = run_clusterkit("status", "--fileroot", str(tmp_path)).stdout
    assert "GPU memory ran out" in shown
    assert "train.max_tokens_per_mb: 16384 → 8192" in shown


@pytest.mark.parametrize(
    ("ending", "parts"),
    [
        (f"print({OUT_OF_MEMORY!r}); raise SystemExit(1)", ("GPU memory ran out while training", "16384 → 8192")),
        ("import os; os.kill(os.getpid(), 9)", ("A process was killed (SIGKILL)", "dmesg -T")),
    ],
)
def test_a_train_command_that_fails_says_why(tmp_path: Path, ending: str, parts: tuple[str, ...]) -> None:
    run = RunWriter(tmp_path).run
    config = resolve("tiny", None, [f"fileroot={tmp_path}"]).config
    with prepared(run, config) as attempt, showing("run", False) as progress:
        outcome = follow(run, [sys.executable, "-c", ending], attempt, progress, "clusterkit train --preset tiny")
    assert outcome.exit_code == 1
    assert all(part in outcome.message for part in parts), outcome.message
    assert "clusterkit diagnose tiny-recall/run1" in outcome.message
    later = run_clusterkit("diagnose", "--fileroot", str(tmp_path)).stdout
    assert parts[0] in later
    assert ("ended by SIGKILL" in later) == ("SIGKILL" in parts[0])
    assert ("max_batch_tokens" in later) == ("max_batch_tokens" in parts[1])


def test_a_log_by_itself(tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_bytes(b"\xff\x00junk\n" + OUT_OF_MEMORY.encode())
    done = run_clusterkit("diagnose", "--log", str(log), "--json")
    [finding] = json.loads(done.stdout)["findings"]
    assert (finding["id"], finding["phase"], finding["evidence"][0]["line"]) == ("gpu-memory", "train", 7)
    assert run_clusterkit("diagnose", "--log", str(tmp_path / "none")).returncode == 2
    refused = run_clusterkit("diagnose", "--log", str(log), "--cluster", "lab", "--apply")
    assert refused.returncode == 2
    assert "leave --cluster and --apply out" in refused.stderr
    log.write_bytes(b"")
    assert "Nothing that is known" in run_clusterkit("diagnose", "--log", str(log)).stdout
