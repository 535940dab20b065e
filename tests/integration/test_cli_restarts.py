"""A local trainer (tests/localoperator.py) that crashed is started again, and a stop is heard at every moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from localoperator import operating, stop_run
from runs import wait_for

from clusterkit.backends.local import stop
from clusterkit.runs.directory import lock_holder
from clusterkit.runs.status import observe
from clusterkit.ui.run_status import status_lines
from trainer.files import last_records


@pytest.mark.parametrize(("mode", "cause"), [("crashes", "ended by SIGKILL"), ("faults", "CUDA error 77")])
def test_a_trainer_that_crashed_is_started_again(tmp_path: Path, mode: str, cause: str) -> None:
    with operating(tmp_path, mode) as operator:
        code, err, outcome, _ = operator.end()

    told = f"({cause}): restart 1 in 0 s; the last recover checkpoint is that after step 2"
    told = told if mode == "crashes" else told.replace("(CUDA", "(AcceleratorError: CUDA")
    assert (code, outcome["status"], outcome["exit_code"]) == (0, "completed", 0)
    assert operator.run.attempt_numbers() == [1, 2]
    assert told in err
    assert told in (operator.run.logs / "main.log").read_text()
    (warning,) = (record["message"] for record in last_records(operator.run.metrics) if record["kind"] == "warning")
    assert told in warning
    assert told in "\n".join(status_lines(observe(operator.run, time.time())))


def test_a_new_start_that_is_refused_is_tried_again(tmp_path: Path) -> None:
    """The first was not, with the same configuration: storage or a GPU may be away for a while."""
    with operating(tmp_path, "crashes, is refused") as operator:
        code, _, outcome, _ = operator.end()

    assert (code, outcome["status"]) == (0, "completed")
    assert operator.run.attempt_numbers() == [1, 2, 3]


def test_a_trainer_that_crashes_again_and_again_is_given_up(tmp_path: Path) -> None:
    with operating(tmp_path, "killed") as operator:
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (1, "killed")
    assert operator.run.attempt_numbers() == [1, 2]
    assert "started 2 times: it has failed 2 times in the same way after step 2" in message


@pytest.mark.parametrize("mode", ["disk", "config", "traceback"])
def test_an_error_that_asks_for_something_is_told_at_once(tmp_path: Path, mode: str) -> None:
    with operating(tmp_path, mode, 600.0) as operator:
        operator.end()

    assert operator.run.attempt_numbers() == [1]


@pytest.mark.parametrize("by", ["Ctrl-C", "stop"])
def test_a_run_that_waits_to_start_again_is_told_so_and_can_be_stopped(tmp_path: Path, by: str) -> None:
    with operating(tmp_path, "crashes", 600.0) as operator:
        log = operator.run.logs / "main.log"
        wait_for(lambda: log.exists() and "restart 1 in 600 s" in log.read_text())
        seen = observe(operator.run, time.time())
        assert (seen.state, seen.holder) == ("running", f"process {operator.process.pid}")
        assert "ended by SIGKILL): restart 1 in 600 s" in seen.message
        assert operator.run.restart_waits
        if by == "stop":
            stop_run(tmp_path / "runs", force=False)
        else:
            operator.process.send_signal(signal.SIGINT)
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    assert "To go on: clusterkit train --preset tiny" in message
    assert operator.run.attempt_numbers() == [1]
    assert not operator.run.restart_waits


@pytest.mark.parametrize(
    ("moment", "attempts"), [("_record_warning", [1]), ("wait_or_signal", [1, 2])], ids=["before", "after"]
)
def test_a_stop_in_the_moment_before_or_after_the_wait_is_heard(
    tmp_path: Path, moment: str, attempts: list[int]
) -> None:
    with operating(tmp_path, "crashes", 600.0 if attempts == [1] else 0.0, told_after=moment) as operator:
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    assert "To go on: clusterkit train --preset tiny" in message
    assert operator.run.attempt_numbers() == attempts
    assert not operator.run.restart_waits


def test_a_stop_while_the_last_end_is_recorded_is_told_to_a_sweep(tmp_path: Path) -> None:
    with operating(tmp_path, "traceback", told_after="_record_end") as operator:
        code, _, outcome, _ = operator.end()

    assert (code, outcome["status"], outcome["stopped"]) == (1, "failed", True)


def test_a_second_signal_ends_what_hangs_between_two_trainers() -> None:
    script = """
import os, signal, time
from clusterkit.backends.local import launch
launch.SECOND_THOUGHT_SECONDS = 0.0
with launch.noting_signals() as noted:
    os.kill(os.getpid(), signal.SIGINT)
    assert noted() == signal.SIGINT
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("ended")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "ended\n"


@pytest.mark.parametrize("first", ["force", "SIGTERM"])
def test_a_run_that_is_ended_by_force_is_not_started_again(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may end of the signal that its command passes on before force reaches it, or after."""
    with operating(tmp_path, "serve") as operator:
        operator.child()
        send = stop.send_signal

        def send_and_wait(process: int, lock: Path, number: signal.Signals) -> None:
            send(process, lock, number)
            if first == "SIGTERM" and process == operator.process.pid:
                wait_for(lambda: lock_holder(operator.run.logs / "run.lock") is None)

        monkeypatch.setattr(stop, "send_signal", send_and_wait)
        said = stop_run(tmp_path / "runs", force=True)
        code, _, outcome, _ = operator.end()

    assert "was ended by force" in said
    kept = operator.run.has_recover_checkpoint
    assert kept or first == "force"
    assert ("goes on from its recover checkpoint" if kept else "has written no recover checkpoint") in said
    assert (code, outcome["status"]) == (130, "interrupted")
    assert operator.run.attempt_numbers() == [1]
