"""Checks over metrics.jsonl, stalls, and what they propose, on run directories as the trainer writes them."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_writer import RunWriter

from clusterkit.runs.diagnose.model import Cause
from clusterkit.runs.diagnose.run import diagnose_run
from clusterkit.runs.diagnose.stall import process_state
from clusterkit.runs.directory import hold_lock
from clusterkit.runs.status import observe
from trainer.config import RunConfig

Stats = Callable[[int], dict[str, Any]]


def _writer(root: Path, *overrides: str) -> RunWriter:
    return RunWriter(root).config(*overrides).attempt(total_steps=100)


def _steps(writer: RunWriter, count: int, stats: Stats, seconds: float = 4.0) -> RunWriter:
    first = writer.number and len(writer.run.metrics.read_text().splitlines())
    for step in range(first, first + count):
        writer.clock += seconds
        writer.record("step", global_step=step, total_steps=100, step_time_s=seconds, stats=stats(step))
    return writer


def _findings(writer: RunWriter) -> dict[str, Cause]:
    return {finding.id: finding for finding in diagnose_run(writer.run).findings}


def _only(writer: RunWriter, identity: str) -> Cause:
    findings = _findings(writer.finish("interrupted", 1))
    assert list(findings) == [identity]
    return findings[identity]


def _learning(step: int) -> dict[str, Any]:
    noise = random.Random(step).uniform(-0.02, 0.02)
    return {
        "task_reward": min(0.2 + step / 100 + noise, 1.0),
        "entropy": 1.0 / step,
        "actor_loss": 0.01,
        "grad_norm": 0.3,
    }


def test_a_run_that_learns_is_no_finding(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 80, _learning).recover(80)
    assert _findings(writer.finish("completed", 80)) == {}


@pytest.mark.parametrize("stats", [{"actor_loss": "nan"}, {"grad_norm": "inf"}, {"skipped_steps": 1.0}])
def test_what_is_no_number_wants_a_lower_rate_and_a_new_trial(tmp_path: Path, stats: dict[str, Any]) -> None:
    writer = _steps(_steps(_writer(tmp_path), 5, _learning), 1, lambda step: {**_learning(step), **stats})
    finding = _only(writer, "nan-loss")
    first = finding.changes[0]
    assert (first.key, first.now, first.proposed) == ("train.learning_rate", 1e-4, pytest.approx(3e-5))
    assert first.new_trial
    assert finding.applicable is None


@pytest.mark.parametrize("lowest", [0.0, -5.0])
def test_always_wrong(tmp_path: Path, lowest: float) -> None:
    writer = _steps(_writer(tmp_path), 4, lambda step: {"task_reward": lowest, "no_eos_ratio": 0.1})
    finding = _only(writer, "reward-lowest")
    assert finding.changes == ()
    assert "clusterkit trace --full" in finding.advice[0]


def test_always_wrong_because_answers_are_cut_off(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 4, lambda step: {"task_reward": 0.0, "no_eos_ratio": 0.98})
    changes = {change.key: (change.now, change.proposed) for change in _only(writer, "reward-lowest").changes}
    assert changes["agent.max_final_tokens"] == (4, 8)


def _flat(step: int) -> dict[str, Any]:
    return {"task_reward": 0.3 + random.Random(step).uniform(-0.05, 0.05)}


def test_a_reward_that_never_changes_is_flat_whatever_it_is(tmp_path: Path) -> None:
    writer = _writer(tmp_path, "rollout.batch_size=8")
    _steps(writer, 60, lambda _: {"task_reward": 0.5, "zero_variance_groups": 8.0}).recover(60)
    assert _only(writer, "reward-flat").changes[0].key == "rollout.group_size"


def test_a_flat_reward(tmp_path: Path) -> None:
    finding = _only(_steps(_writer(tmp_path), 60, _flat).recover(60), "reward-flat")
    assert finding.changes[0].key == "train.learning_rate"
    assert finding.changes[0].proposed > finding.changes[0].now
    told = re.search(r"a rise of (\S+) \(95 %: (\S+) … (\S+)\)", finding.evidence[0].text)
    assert told is not None
    rise, low, high = map(float, told.groups())
    values = [_flat(step)["task_reward"] for step in range(1, 61)]
    first, last = values[:20], values[-20:]
    spread = math.sqrt((statistics.variance(first) + statistics.variance(last)) / 20)
    assert rise == pytest.approx(statistics.fmean(last) - statistics.fmean(first), abs=1e-4)
    assert (high - low) / 2 == pytest.approx(2 * spread, abs=2e-4)


def test_a_flat_reward_because_all_answers_of_a_task_are_alike(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 60, lambda step: {**_flat(step), "zero_variance_groups": 31.0}).recover(60)
    assert _only(writer, "reward-flat").changes[0].key == "rollout.group_size"


def test_a_learned_task_is_not_flat(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 60, lambda step: {"task_reward": 0.97 + 0.01 * (step % 2)}).recover(60)
    assert _findings(writer.finish("completed", 60)) == {}


def test_entropy_collapse(tmp_path: Path) -> None:
    def stats(step: int) -> dict[str, Any]:
        return {"task_reward": 0.3 + step % 2 / 100, "entropy": 1.0 if step < 10 else 0.01}

    finding = _only(_steps(_writer(tmp_path), 30, stats).recover(30), "entropy-collapse")
    assert (finding.changes[0].key, finding.changes[0].proposed) == ("algorithm.clip_high", 0.28)


@pytest.mark.parametrize("stats", [{"importance_weight": 4.0}, {"actor_clip_ratio": 0.7}])
def test_updates_that_go_too_far(tmp_path: Path, stats: dict[str, Any]) -> None:
    writer = _steps(_writer(tmp_path, "train.minibatches=4"), 8, lambda step: {**_learning(step), **stats}).recover(8)
    first = _only(writer, "ratio-drift").changes[0]
    assert (first.key, first.now, first.proposed) == ("train.minibatches", 4, 2)


def test_engine_and_trainer_disagree(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 8, lambda step: {**_learning(step), "mismatch_kl": 0.05}).recover(8)
    assert _only(writer, "mismatch").changes[0].proposed == "recompute"


def test_trajectories_that_fail(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 8, lambda step: {**_learning(step), "failed_trajectories": 64.0}).recover(8)
    assert "25%" in _only(writer, "failed-trajectories").title


def _waiting(share: float) -> Stats:
    return lambda step: {**_learning(step), "judge_share": share}


def test_a_judge_that_is_waited_for(tmp_path: Path) -> None:
    in_turns = _steps(_writer(tmp_path / "a", "servers.engine=vllm"), 8, _waiting(0.3)).recover(8)
    finding = _only(in_turns, "judge-wait")
    assert "30%" in finding.title
    assert [(change.key, change.new_trial) for change in finding.changes] == [
        ("rollout.max_staleness", True),
        ("judge.concurrency", False),
    ]
    assert finding.applicable is finding.changes[1]
    assert [change.proposed for change in finding.changes] == [2, 256]


@pytest.mark.parametrize(("staleness", "proposed"), [(2, [4]), (4, [])])
def test_a_judge_that_is_waited_for_ahead_of_it(tmp_path: Path, staleness: int, proposed: list[int]) -> None:
    settings = ("servers.engine=vllm", f"rollout.max_staleness={staleness}", "judge.concurrency=100")
    ahead = _steps(_writer(tmp_path, *settings), 8, _waiting(0.3)).recover(8)
    assert [change.proposed for change in _only(ahead, "judge-wait").changes] == [*proposed, 200]


def test_a_judge_that_is_hardly_waited_for_is_no_finding(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 8, _waiting(0.08)).recover(8).finish("interrupted", 1)
    assert not _findings(writer)


def test_a_slow_judge_explains_no_failure(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 8, _waiting(0.3)).recover(8).finish("failed", 1)
    assert "judge-wait" not in _findings(writer)


def _reading(cached: float, possible: float) -> Stats:
    return lambda step: {**_learning(step), "cached_share": cached, "shareable_share": possible}


def test_prompts_that_are_read_again(tmp_path: Path) -> None:
    served = "servers.engine=vllm"
    off = _steps(_writer(tmp_path / "off", served, "rollout.share_prefixes=false"), 8, _reading(0.1, 0.75)).recover(8)
    finding = _only(off, "read-again")
    assert "65%" in finding.title
    assert [(change.key, change.proposed, change.new_trial) for change in finding.changes] == [
        ("rollout.share_prefixes", True, False)
    ]
    on = _steps(_writer(tmp_path / "on", served), 8, _reading(0.4, 0.75)).recover(8)
    assert [change.key for change in _only(on, "read-again").changes] == ["rollout.gpu_memory_fraction"]
    paper = _steps(_writer(tmp_path / "paper", served), 8, _reading(0.2, 0.23)).recover(8)
    finding = _only(paper, "read-again")
    assert "repeat_problem" in finding.advice[0]
    (change,) = finding.changes
    assert (change.key, change.proposed, change.new_trial) == ("agent.prompt_order", "section_first", True)


@pytest.mark.parametrize(
    "settings",
    [
        ("servers.engine=vllm", "agent.prompt_order=section_first"),
        ("servers.engine=vllm", "rollout.group_size=1", "control.zero_advantages=true"),
        (),
    ],
)
def test_prompts_that_share_little_anyway_are_no_finding(tmp_path: Path, settings: tuple[str, ...]) -> None:
    writer = _steps(_writer(tmp_path, *settings), 8, _reading(0.2, 0.23)).recover(8).finish("interrupted", 1)
    assert not _findings(writer)


def test_prompts_that_are_read_again_explain_no_failure(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path, "servers.engine=vllm"), 8, _reading(0.1, 0.75)).recover(8).finish("failed", 1)
    assert "read-again" not in _findings(writer)


def _computing(again: float, group: float) -> Stats:
    return lambda step: {**_learning(step), "train_repeated": again, "train_group_tokens": group}


def test_sections_that_training_computes_again(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path, "train.max_tokens_per_mb=16384"), 8, _computing(0.2, 33_054.0)).recover(8)
    finding = _only(writer, "computed-again")
    assert "20%" in finding.title
    assert "train.max_tokens_per_mb up to 33792" in finding.advice[0]
    assert not finding.changes  # whether a GPU has room is for the user to look at


@pytest.mark.parametrize(("again", "group"), [(0.2, 16_000.0), (0.03, 33_054.0)], ids=["room by now", "little"])
def test_little_that_is_computed_again_is_no_finding(tmp_path: Path, again: float, group: float) -> None:
    writer = _steps(_writer(tmp_path, "train.max_tokens_per_mb=16384"), 8, _computing(again, group)).recover(8)
    assert not _findings(writer.finish("interrupted", 1))


def test_recover_checkpoints_that_no_longer_come(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 3, _learning).recover(3)
    writer = _steps(writer, 10, _learning, seconds=400.0)
    assert _only(writer, "stale-recover").changes == ()


def test_recover_checkpoints_that_are_rare_because_it_was_set_so(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path, "checkpoint.ckpt_freq_secs=86400"), 3, _learning).recover(3)
    finding = _only(_steps(writer, 30, _learning, seconds=400.0), "stale-recover")
    assert finding.applicable is not None
    assert (finding.applicable.key, finding.applicable.proposed) == ("checkpoint.ckpt_freq_secs", 600.0)


def test_attempt_after_attempt_dies(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 3, _learning).recover(3)
    for _ in range(3):
        writer.clock += 10
        writer.attempt(resume_step=3)
        writer.run.console(writer.number).write_text("error: OSError: [Errno 24] Too many open files\n")
        writer.finish("failed", 3)
    assert list(_findings(writer)) == ["too-many-files", "restart-loop"]


def test_killed_without_a_word(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 3, _learning).recover(3)
    finding = _findings(writer)["killed"]
    assert (finding.title, finding.changes) == ("The trainer ended without a message", ())  # no sign of any cause
    writer.run.exit_mark(1).write_text('{"code": -9}')
    finding = _findings(writer)["killed"]
    assert (finding.title, finding.changes) == ("A process was killed (SIGKILL)", ())
    assert "SIGKILL (the kernel for want of memory" in finding.evidence[0].text
    writer.run.console(1).write_text("[12345.678] Out of memory: Killed process 4242 (python) total-vm:93184000kB\n")
    assert "killed" not in _findings(writer)
    proposed = [change.key for change in _findings(writer)["host-memory"].changes]
    assert proposed[:2] == ["rollout.max_batch_tokens", "train.max_tokens_per_mb"]
    writer.run.console(1).unlink()
    writer.run.exit_mark(1).write_text('{"code": -11}')
    assert list(_findings(writer)) == ["crashed"]


def test_the_message_of_a_full_disk_is_known_where_no_log_could_be_written(tmp_path: Path) -> None:
    message = "no space left for a recover checkpoint under /runs/recover (the one of step 3 is untouched)"
    writer = _steps(_writer(tmp_path), 3, _learning).recover(3).finish("failed", 3, message)
    finding = _findings(writer)["disk-full"]
    assert finding.changes == ()  # nothing says that trajectories filled it
    writer = _writer(tmp_path / "2").finish("failed", 3, "no space left at /runs/rollouts/step_3.jsonl.zst: free some")
    assert [change.key for change in _findings(writer)["disk-full"].changes] == ["rollout.save_trajectories"]


def test_an_engine_server_gets_a_smaller_share_of_the_gpu(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    config = RunConfig(allocation_mode="sglang.d4p1m1+d4p1m1", n_gpus_per_node=8, rollout={"batch_size": 32})
    writer.run.config.write_text(yaml.safe_dump(config.model_dump()))
    writer.attempt()
    lines = "[2026-11-21 08:53:47] init custom process group: rank=1\n"
    lines += "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    writer.run.console(1).write_text(lines)
    first = _findings(writer)["gpu-memory"].changes[0]
    assert (first.key, first.now, first.proposed) == ("rollout.gpu_memory_fraction", 0.8, 0.7)


def _stalled(writer: RunWriter) -> RunWriter:
    writer.clock -= 5000
    return _steps(writer, 3, _learning)


def test_a_stall_says_what_was_written_last(tmp_path: Path) -> None:
    writer = _stalled(_writer(tmp_path))
    (writer.run.logs / "main.log").write_text(
        "20990222-11:53:02.760 master worker INFO: Model rpc actor_gen requested.\n"
    )
    with hold_lock(writer.run.logs / "run.lock"):
        finding = _findings(writer)["stall"]
    assert finding.phase == "generate"
    assert "actor_gen requested" in finding.evidence[0].text
    assert any(f"py-spy dump --pid {os.getpid()}" in advice for advice in finding.advice)


def test_a_stopped_process_is_told_from_one_that_hangs(tmp_path: Path) -> None:
    writer = _stalled(_writer(tmp_path))
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); import os"
    code += "; f.write(str(os.getpid())); f.flush(); print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(writer.run.logs / "run.lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 300
        while process_state(process.pid) != "T" and time.monotonic() < deadline:
            os.sched_yield()
        finding = _findings(writer)["stall"]
    finally:
        process.kill()
        process.communicate()
    assert finding.advice == (f"kill -CONT {process.pid}",)


def test_messages_of_earlier_attempts_do_not_count(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 3, _learning).recover(3)
    old = time.strftime("%Y%m%d-%H:%M:%S", time.localtime(writer.clock - 5000))
    (writer.run.logs / "main.log").write_text(
        f"{old}.000 master worker ERROR: OSError: [Errno 28] No space left on device\n"
    )
    writer.run.console(1).write_text("OSError: [Errno 28] No space left on device\n")
    writer.finish("failed", 3)
    writer.attempt(resume_step=3)
    assert _findings(_steps(writer, 1, _learning).finish("interrupted", 4)) == {}


@pytest.mark.parametrize("ahead", [-8 * 3600, 0, 5.75 * 3600])
def test_a_log_of_another_time_zone_is_read_from_its_last_attempt_on(tmp_path: Path, ahead: float) -> None:
    writer, lines = _writer(tmp_path), list[str]()
    writer.clock -= 5000

    def say(text: str) -> None:
        stamp = time.strftime("%Y%m%d-%H:%M:%S", time.localtime(writer.clock + ahead))
        lines.append(f"{stamp}.000 master worker {text}")

    for step in range(1, 4):
        _steps(writer, 1, _learning)
        say(f"INFO: Epoch 1/1 step {step}/9 (global step {step}) finishes. Average")
    say("ERROR: OSError: [Errno 28] No space left on device")
    writer.finish("failed", 3).clock += 1000
    made = writer.attempt(resume_step=3).run.logs / "attempt_2"
    os.utime(made, (writer.clock, writer.clock))
    writer.clock += 60
    say("ERROR: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    (writer.run.logs / "main.log").write_text("\n".join(lines) + "\n")

    found = _findings(writer.finish("failed", 3, "it failed"))

    assert "gpu-memory" in found
    assert "disk-full" not in found


def test_a_step_at_no_time_in_a_log_is_no_crash(tmp_path: Path) -> None:
    writer = _steps(_writer(tmp_path), 3, _learning).finish("failed", 3)
    (writer.run.logs / "main.log").write_text("20261399-10:00:00.000 master worker (global step 3) finishes\n")
    writer.attempt(resume_step=3)

    assert _findings(_steps(writer, 1, _learning).finish("interrupted", 4)) == {}


def test_a_run_directory_without_anything_is_no_crash(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    assert diagnose_run(writer.run, observe(writer.run, time.time())).findings == ()
