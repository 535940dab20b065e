"""`train` and its child process: signals, deaths, messages, exit codes.

The child is a small script that writes records as the trainer does and ends in the way under test; the operator is a
process of its own that calls the functions which `clusterkit train` calls, so that real signals can be sent to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from run_writer import RunWriter
from runs import wait_for

from clusterkit.backends.base import Place, RunSelector
from clusterkit.backends.local import stop
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.runs.directory import RunDirectory, lock_holder, user_name
from clusterkit.runs.status import observe
from clusterkit.ui.run_status import status_lines
from trainer.files import last_records

CHILD = """
import fcntl, json, os, signal, subprocess, sys, time
from pathlib import Path
mode, logs, recover = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if mode == "imports":
    (logs / "imports").touch()
    while True:
        time.sleep(0.05)
lock = (logs / "run.lock").open("a+")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
lock.truncate(0)
lock.write(str(os.getpid()))
lock.flush()
metrics = (logs / "metrics.jsonl").open("a")

def record(kind, **fields):
    line = {"kind": kind, "time": time.time(), "attempt": int(os.environ["CLUSTERKIT_ATTEMPT"]), **fields}
    metrics.write(json.dumps(line) + "\\n")
    metrics.flush()

def checkpoint():
    recover.mkdir(parents=True, exist_ok=True)
    (recover / "LATEST").write_text("slot-a")
    record("recover", global_step=2, slot="a", path="slot-a", bytes=1000, seconds=0.1)

def stop(number, frame):
    checkpoint()
    record("finish", status="interrupted", message="")
    print("error: interrupted after step 2: a recover checkpoint is written", file=sys.stderr)
    if mode == "serve, dies at its end":
        os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit(130)

signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else stop)
record("attempt", resume_step=0, total_steps=9)
for step in (1, 2):
    record("step", global_step=step, total_steps=9, step_time_s=0.1, tokens_per_s=10.0, stats={"task_reward": 0.5})
print("a library's warning")
if mode == "stubborn":
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record("step", global_step=3, total_steps=9, helper=helper.pid)
if mode.startswith(("serve", "stubborn")):
    while True:
        time.sleep(0.05)
if mode == "disk":
    print("error: no space left while writing a recover checkpoint:\\nmake room", file=sys.stderr)
    sys.exit(1)
if mode == "config":
    print("error: chunk + memory + question exceed the context window", file=sys.stderr)
    sys.exit(2)
if mode == "traceback":
    raise RuntimeError("a fault nobody caught")
if mode == "crashes, is refused" and os.environ["CLUSTERKIT_ATTEMPT"] == "2":
    sys.exit(2)
if mode.startswith(("crashes", "faults")) and os.environ["CLUSTERKIT_ATTEMPT"] == "1":
    checkpoint()
    if mode != "faults":
        metrics.write('{"kind": "step", "glo')  # a line that the kill cuts off
        metrics.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    record("finish", status="failed", global_step=2, message="AcceleratorError: CUDA error 77", crashed=True)
    print("error: AcceleratorError: CUDA error 77", file=sys.stderr)
    sys.exit(1)
if mode == "killed":
    checkpoint()
    os.kill(os.getpid(), signal.SIGKILL)
"""

OPERATOR = """
import json, os, signal, sys
from pathlib import Path
from clusterkit.backends.local import train
from clusterkit.ui.progress import PlainLines
from clusterkit.config.resolve import resolve
from clusterkit.backends.local.train import Restarts, follow, prepared
from clusterkit.runs.trials import run_directory
from trainer.errors import UserError
script, mode, root, wait, told_after = sys.argv[1:]
if told_after:
    original = getattr(train, told_after)
    def and_signal(*arguments):
        found = original(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return found
    setattr(train, told_after, and_signal)
config = resolve("tiny", None, [f"fileroot={root}"]).config
run = run_directory(config, "run1")
argv = [sys.executable, script, mode, str(run.logs), str(run.recover)]
try:
    with prepared(run, config) as attempt:
        outcome = follow(run, argv, attempt, PlainLines(), "clusterkit train --preset tiny", Restarts(10, float(wait)))
except UserError as error:
    sys.exit(f"refused: {error}")
print(json.dumps({**outcome.as_dict(run), "stopped": outcome.stopped}))
sys.exit(outcome.exit_code)
"""


class Operator:
    """The operator's process on a run directory, and what can be seen of its child.

    told_after: function of clusterkit.backends.local.train after which SIGTERM comes, as from `clusterkit stop`.
    """

    def __init__(self, folder: Path, mode: str, wait: float = 0.0, told_after: str = "", **options: object) -> None:
        self.run = RunDirectory(folder / "runs", user_name(), "tiny-recall", "run1")
        script = folder / "child.py"
        script.write_text(CHILD)
        command = [sys.executable, "-c", OPERATOR, str(script), mode, str(folder / "runs"), str(wait), told_after]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **{**pipes, **options})  # type: ignore[call-overload]

    def child(self) -> psutil.Process:
        """The trainer's process, once it holds the run."""
        wait_for(lambda: lock_holder(self.run.logs / "run.lock") is not None and len(self.steps()) >= 2)
        return psutil.Process(self.process.pid).children()[0]

    def steps(self) -> list[dict[str, object]]:
        """The step records that are on disk."""
        lines = self.run.metrics.read_text().splitlines() if self.run.metrics.exists() else []
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]

    def end(self) -> tuple[int, str, dict[str, object], str]:
        """Exit code, stderr, outcome and its message."""
        out, err = self.process.communicate(timeout=300)
        outcome = json.loads(out) if out else {}
        return self.process.returncode, err, outcome, str(outcome.get("message", ""))


def stop_run(folder: Path, *, force: bool, once_told: Callable[[], None] = lambda: None) -> str:
    with LocalBackend(Place(fileroot=str(folder)), lambda _: once_told()) as backend:
        return backend.stop(RunSelector(), deadline=30, force=force).message


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _signal_mask(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1], 16)


@contextmanager
def operating(folder: Path, mode: str, wait: float = 0.0, **options: object) -> Iterator[Operator]:
    """An operator whose processes are gone afterwards, whatever the test found."""
    operator = Operator(folder, mode, wait, **options)
    try:
        yield operator
    finally:
        family = [operator.process.pid]
        if operator.process.poll() is None:
            family += [process.pid for process in psutil.Process(operator.process.pid).children(recursive=True)]
        for pid in family:
            if not _gone(pid):
                os.kill(pid, signal.SIGKILL)
        operator.process.wait()


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
    assert _gone(child.pid)


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
        assert not _gone(child.pid)

        def killed() -> bool:
            operator.process.send_signal(signal.SIGINT)
            return _gone(child.pid) and _gone(helper)

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
            wait_for(lambda: _gone(child.pid))
        assert "is stopped; the same train command goes on from its recover checkpoint" in said
        assert observe(operator.run, time.time()).state == "interrupted"


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
