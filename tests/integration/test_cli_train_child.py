"""`train` and its child process (tests/localoperator.py): signals, deaths, messages, exit codes."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from localoperator import gone, operating, stop_run
from run_writer import RunWriter
from runs import wait_for

from clusterkit.runs.directory import lock_holder
from clusterkit.runs.status import observe
from clusterkit.ui.run_status import status_lines


def _signal_mask(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1], 16)


def test_a_run_to_its_end(tmp_path: Path) -> None:
    with operating(tmp_path, "complete") as operator:
        code, err, outcome, _ = operator.end()

    assert code == 0
    assert (outcome["status"], outcome["global_step"]) == ("completed", 2)
    assert "step 1/9  task_reward 0.500" in err
    assert "step 2/9" in err
    assert operator.run.console(1).read_text() == "a library's warning\n"
    assert operator.run.config.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_lets_the_trainer_write_a_checkpoint(tmp_path: Path, name: str) -> None:
    with operating(tmp_path, "serve") as operator:
        child = operator.child()
        operator.process.send_signal(getattr(signal, name))
        code, err, outcome, message = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    assert "recover checkpoint after step 2" in err
    assert "interrupted after step 2: a recover checkpoint is written" in message
    assert "To go on: clusterkit train --preset tiny" in message
    assert gone(child.pid)


def test_a_hang_up_under_nohup_is_ignored_and_sigint_in_the_background_is_not(tmp_path: Path) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with operating(tmp_path, "serve", preexec_fn=ignore) as operator:
        operator.child()
        assert _signal_mask(operator.process.pid, "SigIgn") & 1 << (signal.SIGHUP - 1)
        operator.process.send_signal(signal.SIGHUP)
        operator.process.send_signal(signal.SIGINT)
        code, _, outcome, _ = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")


def test_two_signals_at_once_are_one_wish(tmp_path: Path) -> None:
    with operating(tmp_path, "serve") as operator:
        operator.child()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            operator.process.send_signal(number)
        code, _, _, message = operator.end()

    assert code == 130
    assert "a recover checkpoint is written" in message


def test_a_second_thought_kills_the_trainer_and_what_it_started(tmp_path: Path) -> None:
    told = tmp_path / "stderr"
    with told.open("w") as stderr, operating(tmp_path, "stubborn", stderr=stderr) as operator:
        child = operator.child()
        wait_for(lambda: len(operator.steps()) == 3)
        helper = int(str(operator.steps()[2]["helper"]))
        operator.process.send_signal(signal.SIGINT)
        wait_for(lambda: "interrupt again to kill the trainer" in told.read_text())
        assert not gone(child.pid)

        def killed() -> bool:
            operator.process.send_signal(signal.SIGINT)
            return gone(child.pid) and gone(helper)

        wait_for(killed)
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    assert "no recover checkpoint yet" in message
    assert observe(operator.run, time.time()).state == "interrupted"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
@pytest.mark.parametrize("by", ["Ctrl-C", "stop"])
def test_a_trainer_that_is_killed_while_it_stops_was_killed_and_is_not_started_again(
    tmp_path: Path, by: str, name: str
) -> None:
    """By the kernel, say, for want of memory: no checkpoint of its last step is written."""
    told = tmp_path / "stderr"
    with told.open("w") as stderr, operating(tmp_path, "stubborn", stderr=stderr) as operator:
        child = operator.child()
        wait_for(lambda: len(operator.steps()) == 3)
        kill = partial(child.send_signal, getattr(signal, name))
        if by == "stop":
            said = stop_run(tmp_path / "runs", force=False, once_told=kill)
            assert "is stopped; its trainer was killed while it stopped; it has written no recover checkpoint" in said
        else:
            operator.process.send_signal(signal.SIGINT)
            wait_for(lambda: "interrupt again to kill the trainer" in told.read_text())
            kill()
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (1, "killed")
    assert f", {name}" in message
    assert " while it stopped; there is no recover checkpoint yet" in message
    assert operator.run.attempt_numbers() == [1]
    status = observe(operator.run, time.time())
    assert status.state == "killed"
    assert " while it stopped; there is no recover checkpoint yet" in status.message


def test_a_trainer_that_dies_after_it_has_said_that_it_was_interrupted_was(tmp_path: Path) -> None:
    with operating(tmp_path, "serve, dies at its end") as operator:
        operator.child()
        operator.process.send_signal(signal.SIGINT)
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    assert "the last recover checkpoint is that after step 2" in message
    assert observe(operator.run, time.time()).state == "interrupted"


def test_a_run_that_is_interrupted_while_its_trainer_imports_says_so_afterwards(tmp_path: Path) -> None:
    with operating(tmp_path, "imports") as operator:
        wait_for((operator.run.logs / "imports").exists)
        operator.process.send_signal(signal.SIGINT)
        code, _, outcome, _ = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
    status = observe(operator.run, time.time())
    assert (status.state, operator.run.has_ended) == ("interrupted", True)
    assert status.message.startswith("interrupted: there is no recover checkpoint yet")


def test_the_trainers_message_is_told_once_with_its_exit_code(tmp_path: Path) -> None:
    with operating(tmp_path, "disk") as operator:
        code, err, outcome, message = operator.end()

    assert (code, outcome["status"]) == (1, "failed")
    assert message == "error: no space left while writing a recover checkpoint:\nmake room"
    assert "no space" not in err


def test_a_configuration_that_the_trainer_refuses_is_exit_code_2(tmp_path: Path) -> None:
    with operating(tmp_path, "config") as operator:
        code, _, _, message = operator.end()

    assert code == 2
    assert message == "error: chunk + memory + question exceed the context window"


def test_a_trainer_that_ends_without_a_message_shows_its_last_lines(tmp_path: Path) -> None:
    with operating(tmp_path, "traceback") as operator:
        code, _, _, message = operator.end()

    assert code == 1
    assert "ended with code 1 and no message" in message
    assert "RuntimeError: a fault nobody caught" in message
    assert "To go on: clusterkit train --preset tiny" in message


def test_a_killed_trainer_is_told_with_signal_checkpoint_and_the_way_on(tmp_path: Path) -> None:
    with operating(tmp_path, "killed") as operator:
        code, _, outcome, message = operator.end()

    assert (code, outcome["status"]) == (1, "killed")
    for part in ("signal 9, SIGKILL", "after step 2", "a library's warning", "To go on: clusterkit train"):
        assert part in message
    (mark,) = tmp_path.rglob("attempt_1/exit.json")
    assert json.loads(mark.read_text())["command"].startswith("clusterkit ")


def test_the_trainer_outlives_the_operator_and_its_run_stays_taken(tmp_path: Path) -> None:
    with operating(tmp_path, "serve") as operator:
        child = operator.child()
        operator.process.kill()
        operator.process.wait()
        try:
            assert child.is_running()
            seen = observe(operator.run, time.time())
            assert seen.state == "running"
            assert f"(process {operator.process.pid}) was killed and the trainer goes on without it" in seen.message
            assert "clusterkit stop tiny-recall/run1 --fileroot" in "\n".join(status_lines(seen))
            with operating(tmp_path, "complete") as second:
                code, err, _, _ = second.end()
            assert code == 1
            assert "refused: tiny-recall/run1 is being trained now by" in err
            assert operator.run.attempt_numbers() == [1]
        finally:
            said = stop_run(tmp_path / "runs", force=False)
            wait_for(lambda: gone(child.pid))
        assert "is stopped; the same train command goes on from its recover checkpoint" in said
        assert observe(operator.run, time.time()).state == "interrupted"


def test_a_run_is_taken_before_its_trainer_has_started(tmp_path: Path) -> None:
    with operating(tmp_path, "serve") as operator:
        wait_for(lambda: lock_holder(operator.run.logs / "launch.lock") == f"process {operator.process.pid}")
        with operating(tmp_path, "complete") as second:
            code, err, _, _ = second.end()

    assert code == 1
    assert "being trained now" in err
    assert operator.run.attempt_numbers() in ([], [1])


def test_every_attempt_has_its_own_folder_and_number(tmp_path: Path) -> None:
    for _ in range(2):
        with operating(tmp_path, "complete") as operator:
            operator.end()

    assert operator.run.attempt_numbers() == [1, 2]
    lines = operator.run.metrics.read_text().splitlines()
    assert sorted({json.loads(line)["attempt"] for line in lines}) == [1, 2]


def test_earlier_attempts_are_known_but_not_told_again(tmp_path: Path) -> None:
    RunWriter(tmp_path / "runs").attempt().steps(1, 5)
    with operating(tmp_path, "complete") as operator:
        code, err, outcome, _ = operator.end()

    assert (code, outcome["global_step"]) == (0, 2)
    assert "step 5" not in err


def test_losing_the_terminal_does_not_lose_the_run(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with operating(tmp_path, "serve", stderr=write_end) as operator:
        os.close(write_end)
        operator.child()
        os.close(read_end)  # from here on every message to stderr fails
        operator.process.send_signal(signal.SIGHUP)
        code, _, outcome, _ = operator.end()

    assert (code, outcome["status"]) == (130, "interrupted")
