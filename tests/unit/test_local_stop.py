"""Signals go to the process that holds a lock, and to no other of its number."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterkit.backends.base import Place
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.backends.local.stop import process_run, send_signal
from clusterkit.evaluate.local import LocalEvaluator
from clusterkit.runs.directory import RunDirectory, user_name
from evaluation.record import LOCK
from trainer.errors import RunError

HOLD = """
import sys
from pathlib import Path
from trainer.locks import hold
file = Path(sys.argv[1]).open("a+b")
hold(file, sys.argv[2] if len(sys.argv) > 2 else None)
print("held", flush=True)
sys.stdin.read()
"""


def held(lock: Path, *number: str) -> subprocess.Popen[str]:
    """A process that holds a lock; number: what it writes into it instead of its own."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(lock), *number]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_the_holder_of_a_lock_gets_the_signal(tmp_path: Path) -> None:
    with held(tmp_path / "run.lock") as process:
        send_signal(process.pid, tmp_path / "run.lock", signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM


def test_a_run_that_another_machine_trains_costs_no_process_of_this_one(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """Locks reach over a shared file system, and out of containers; process numbers do not."""
    run = RunDirectory(tmp_path, user_name(), "e", "t")
    with held(run.logs / "run.lock", f"{bystander.pid}\n") as holder:
        living = process_run(run)
        for end in (living.interrupt, living.kill):
            with pytest.raises(RunError, match="another machine or container"):
                end()
        holder.kill()
    assert bystander.poll() is None


def test_the_warm_up_of_a_run_without_checkpoints_is_gone_on_with(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, user_name(), "e", "t")
    run.logs.mkdir(parents=True)
    said = process_run(run).resume_hint
    assert said() == "it has written no recover checkpoint to go on from"
    run.metrics.write_text('{"kind": "warmup", "time": 1.0, "attempt": 1, "phase": "recall", "step": 1, "steps": 9}\n')
    assert said() == "the same train command goes on with what is kept of its warm-up"
    with run.metrics.open("a") as file:
        file.write('{"kind": "attempt", "time": 2.0, "attempt": 1, "resume_step": 0}\n')
    assert said() == "it has written no recover checkpoint to go on from"


def test_an_evaluation_of_another_machine_costs_no_process_of_this_one(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    evaluator = LocalEvaluator(LocalBackend(Place("local"), print))
    with held(tmp_path / LOCK, f"{bystander.pid}\n") as holder:
        with pytest.raises(RunError, match="another machine or container"):
            evaluator.stop(str(tmp_path), user_name())
        holder.kill()
    assert bystander.poll() is None


def test_one_that_has_just_ended_is_no_error(tmp_path: Path) -> None:
    with held(tmp_path / "run.lock") as process:
        process.kill()
    send_signal(process.pid, tmp_path / "run.lock", signal.SIGTERM)
