"""`python -m trainer.launch.job CONFIG.yaml [SUBMITTED.yaml SHA256]`: what a Ray job runs on the head node.

It starts a trainer that died again. SUBMITTED.yaml is the configuration that this job was submitted with: where its
hash is right, it becomes CONFIG.yaml, so that no other submission can have changed what this job trains with.

The trainer's output goes to attempt_N/console.log beside the run's other files, and to the job's own log. How every
attempt ended is kept in attempt_N/exit.json: Ray's word on a job is lost with Ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.config import RunConfig
from trainer.configfile import read_config
from trainer.engines.guard import die_with_parent
from trainer.errors import UserError
from trainer.files import last_records, sha256, write_atomic
from trainer.launch.retries import REFUSED, Ended, judge, retries_of
from trainer.locks import HeldError, hold
from trainer.paths import new_attempt

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """Runs attempt after attempt until the run is done, or another attempt cannot help."""

    def __init__(self, config: Path) -> None:
        self._config, self._logs = config, config.parent
        try:
            self._settings = read_config(config, RunConfig)
        except UserError:
            self._settings = RunConfig()  # the trainer refuses it with its own message, in the run's files
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: dict[Path, dict[str, Any]] = {}  # exit.json of the last attempt, once it has ended
        self._stopped = threading.Event()

    def run(self) -> int:
        """Train to the end; returns the exit code of the last attempt, 128 + N where signal N ended it."""
        for number in _SIGNALS:
            signal.signal(number, self._hand_on)
        ends: list[Ended] = []
        while True:
            try:
                ends.append(self._attempt())
            except OSError as error:  # such as a disk that is full, which may have room the next time
                step = ends[-1].step if ends else 0
                ends.append(Ended(1, f"the attempt cannot be kept track of: {error}", step, began=False))
            verdict = judge(ends, retries_of(self._settings), self._settings.recover_after)
            self._keep_end(verdict.wait)
            code = ends[-1].code
            if verdict.wait is None:
                if not ends[-1].final and (code != REFUSED or len(ends) > 1):
                    _say(f"given up: {verdict.reason}")
                return code if code >= 0 else 128 - code
            _say(f"the trainer failed: {ends[-1].message or f'exit code {code}'}; {verdict.reason}")
            if self._stopped.wait(verdict.wait):
                self._keep_end(None)
                return 130

    def _keep_end(self, wait: float | None) -> None:
        """Write how the last attempt ended. wait: seconds until the next start; None: there is none."""
        with suppress(OSError):
            for path, mark in self._ended.items():
                write_atomic(path, json.dumps({**mark, "restart_s": wait}))

    def _attempt(self) -> Ended:
        number = new_attempt(self._logs)
        self._ended = {}  # not before: without a new attempt it is the last one's end that is written
        folder = self._logs / f"attempt_{number}"
        began, before = time.time(), last_step(self._logs / "metrics.jsonl")
        environment = {**os.environ, "CLUSTERKIT_ATTEMPT": str(number)}
        command = [sys.executable, "-m", "trainer", str(self._config)]
        with (folder / "console.log").open("ab", buffering=0) as console:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                # When this process is killed it can stop or restart the trainer no more.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509 (this process has one thread)
            )
            if self._stopped.is_set():  # the signal came before there was a trainer to send it to
                self._process.terminate()
            assert self._process.stdout is not None
            while data := os.read(self._process.stdout.fileno(), 65536):
                with suppress(OSError):  # words that a full disk does not take are no reason to end the training
                    console.write(data)
                with suppress(OSError):
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
            code = self._process.wait()
        end = ended(self._logs / "metrics.jsonl", number, code, before)
        typed = os.environ.get("CLUSTERKIT_COMMAND", "")
        self._ended = {folder / "exit.json": end_mark(end, began, typed, stopping=self._stopped.is_set())}
        return end

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self._stopped.set()
        if self._process is not None:
            self._process.send_signal(number)


def end_mark(end: Ended, began: float, command: str, *, stopping: bool = False) -> dict[str, Any]:
    """What exit.json says of an attempt that has ended now, but for its restart.

    Args:
        began: Unix seconds.
        command: what was typed; a trainer that was killed during its imports has recorded none.
        stopping: it had been told to stop.
    """
    facts = {"code": end.code, "message": end.message, "global_step": end.step, "command": command}
    return {**facts, "began": began, "ended": time.time(), "stopping": stopping}


def ended(metrics: Path, attempt: int, code: int, before: int) -> Ended:
    """How an attempt ended, from its exit code and its records. before: last step of earlier attempts."""
    records = [record for record in last_records(metrics) if record.get("attempt") == attempt]
    finish = [record for record in records if record.get("kind") == "finish"]
    steps = [record["global_step"] for record in records if record.get("kind") == "step"]
    resume_steps = [record.get("resume_step", 0) for record in records if record.get("kind") == "attempt"]
    started_at = resume_steps[-1] if resume_steps else before
    step = steps[-1] if steps else started_at
    starts = [record.get("recover_step") or 0 for record in records if record.get("phase") == "supervised"]
    kept, kept_at = (0, 0) if resume_steps or not starts else (int(starts[-1]), int(starts[0]))
    began = bool(resume_steps or starts or steps)  # of a long attempt the tail has steps alone
    if finish:
        last = finish[-1]
        # Without the word of a rank 0 that hung or was killed it is the step that the attempt went on after.
        reached = max(int(last.get("global_step") or 0), step)
        crashed = last.get("crashed") is True
        return Ended(code, str(last.get("message", "")), reached, started_at, crashed, kept, kept_at, began)
    message = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} before it began"
    return Ended(code, message, step, started_at, kept=kept, kept_at=kept_at, began=began)


def last_step(metrics: Path) -> int:
    """The last finished step that a run has recorded; 0 without one."""
    steps = [record["global_step"] for record in last_records(metrics) if record.get("kind") == "step"]
    return int(steps[-1]) if steps else 0


def _say(text: str) -> None:
    print(f"clusterkit: {text}", flush=True)


def install(config: Path, submitted: Path, digest: str) -> None:
    """Make the submitted file the run's configuration.

    Raises:
        UserError: its hash is another, or the run is at work.
    """
    try:
        found = sha256(submitted)
    except FileNotFoundError:
        found = "none: it is not there"
    if found != digest:
        raise UserError(
            f"{submitted} is not what this job was submitted with (SHA-256 {digest[:12]}…, found {found[:24]}…): "
            "nothing was started; give the train command again"
        )
    try:
        with config.with_name("run.lock").open("a+b") as lock:
            hold(lock)
    except HeldError as error:  # started in another way: its own restarts must not go on with these settings
        raise UserError(
            f"{config.parent} is already being trained (process {error.holder or '?'} of its host): nothing was started"
        ) from None
    write_atomic(config, submitted.read_text(encoding="utf-8"))


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit code."""
    if len(arguments) not in (1, 3):
        print("usage: python -m trainer.launch.job CONFIG.yaml [SUBMITTED.yaml SHA256]", file=sys.stderr)
        return 2
    config = Path(arguments[0])
    try:
        if len(arguments) == 3:
            install(config, Path(arguments[1]), arguments[2])
        return Job(config).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
