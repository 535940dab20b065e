"""A local run's command with a trainer that ends in the way under test.

The trainer is a small script that writes records as the real one does; the operator is a process of its own that calls
the functions which `clusterkit train` calls, so that real signals can be sent to it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from runs import wait_for

from clusterkit.backends.base import Place, RunSelector
from clusterkit.backends.local.backend import LocalBackend
from clusterkit.runs.directory import RunDirectory, lock_holder, user_name

CHILD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from trainer.locks import hold
mode, logs, recover = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
if mode == "imports":
    (logs / "imports").touch()
    while True:
        time.sleep(0.05)
lock = (logs / "run.lock").open("a+b")
hold(lock)  # waits for those who only look at it, as the tests do
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


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        operator.process.wait()
