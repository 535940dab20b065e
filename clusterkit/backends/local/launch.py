"""Prepare a run directory and keep one trainer process: its output, our signals, the way it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from clusterkit.backends.local.interpreter import missing_packages
from clusterkit.common.origin import origin_environment
from clusterkit.runs.directory import FILEROOT, RunDirectory
from trainer.config import RunConfig
from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.paths import new_attempt as trainer_attempt

POLL_SECONDS = 0.2
SECOND_THOUGHT_SECONDS = 1.0
"""A signal this soon after the first is the same wish (a closing session sends several), not a wish to kill."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """How the trainer ended.

    returncode: as subprocess gives it, negative for a signal. interrupts: ours to it. first: signal that we got first.
    """

    returncode: int
    interrupts: int
    first: int = 0

    @property
    def by_interrupt(self) -> bool:
        """Whether it died of a signal that it was meant to get, and not of the kernel's, say, while it was stopping.

        `clusterkit stop` sends us SIGINT, and with --force SIGTERM, and the trainer SIGKILL; so after any SIGTERM a
        SIGKILL passes for ours.
        """
        forced = self.interrupts > 1 or self.first == signal.SIGTERM
        ours = (signal.SIGTERM, signal.SIGKILL) if forced else (signal.SIGTERM,)
        return self.interrupts > 0 and -self.returncode in ours


def require_trainer(python: str = sys.executable) -> None:
    """Refuse early, with the way out, where the interpreter that is to train lacks the trainer's packages."""
    missing = missing_packages(python, ("torch", "transformers", "safetensors", "numpy", "zstandard", "trainer"))
    if missing and python != sys.executable:
        raise UserError(
            f"training on GPUs needs {', '.join(missing)}, which {python} does not have: run make gpu again"
        )
    if missing:
        raise UserError(
            f"training needs {', '.join(missing)}, which this Python ({python}) does not have: "
            "pip install 'clusterkit[train]'"
        )


def require_writable(run: RunDirectory) -> None:
    """Refuse a run directory that could not be created or written, without creating anything."""
    for folder in (run.logs, run.checkpoints, run.recover):
        nearest = folder
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise UserError(
                f"{nearest} is a file, but the run needs a folder there: choose another with --fileroot FOLDER"
            )
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UserError(
                f"cannot write to {nearest}: change its permissions, or choose another with --fileroot FOLDER"
            )


def write_config(run: RunDirectory, config: RunConfig) -> None:
    """Write config.yaml so that a reader sees the old or the new one, never half of it."""
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    with file_failures(run.logs, FILEROOT):
        run.logs.mkdir(parents=True, exist_ok=True)
        write_atomic(run.config, text)


def new_attempt(run: RunDirectory) -> int:
    """Create the folder of the next free attempt and return its number."""
    with file_failures(run.logs, FILEROOT):
        run.logs.mkdir(parents=True, exist_ok=True)
        return trainer_attempt(run.logs)


def trainer_command(run: RunDirectory, python: str = sys.executable) -> list[str]:
    """The command line of the trainer; -P keeps a folder `trainer` in the current directory out of its way."""
    return [python, "-P", "-m", "trainer", str(run.config)]


def run_trainer(
    argv: Sequence[str],
    console: Path,
    attempt: int,
    on_poll: Callable[[], None],
    on_interrupt: Callable[[], None],
    noted: Callable[[], int] = lambda: 0,
) -> Ending:
    """Run the trainer in a session of its own until it ends, whatever happens to our terminal.

    The first SIGINT, SIGTERM or SIGHUP is handed on as SIGTERM, once; a second one kills its process group.
    `on_poll` is called a few times a second and once after the end, `on_interrupt` after the first signal.

    Args:
        noted: the signal that came before, of `noting_signals`.
    """
    own = {"CLUSTERKIT_ATTEMPT": str(attempt), "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    environment = {**os.environ, **origin_environment(), **own}
    child: subprocess.Popen[bytes] | None = None
    interrupts = handed_on = first = 0
    first_at = 0.0
    announced = False

    def interrupt(signum: int, _frame: object) -> None:
        nonlocal interrupts, first, first_at
        if not interrupts:
            first, first_at = signum, time.monotonic()
        elif signum == signal.SIGHUP or time.monotonic() - first_at < SECOND_THOUGHT_SECONDS:
            return
        interrupts += 1
        hand_on()

    def hand_on() -> None:
        nonlocal handed_on
        if child is None or handed_on == interrupts:
            return
        handed_on = interrupts
        if interrupts > 1:
            _kill_group(child)
        else:
            child.terminate()

    # Handlers come first: a signal while the child starts would else leave it behind without a word.
    previous = _handle(interrupt)
    if noted():
        interrupt(noted(), None)
    try:
        with file_failures(console, FILEROOT), console.open("ab") as output:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        hand_on()  # what came before there was anyone to hand it on to
        while child.poll() is None:
            if interrupts and not announced:
                announced = True
                on_interrupt()
            on_poll()
            time.sleep(POLL_SECONDS)
        on_poll()
    finally:
        for name, handler in previous.items():
            # Someone who keeps pressing Ctrl-C still wants to read how it ended.
            signal.signal(name, signal.SIG_IGN if interrupts else handler)
    if child.returncode < 0:
        _kill_group(child)  # ranks whose leader is gone would wait for it for ever
    return Ending(child.returncode, interrupts, first)


@contextlib.contextmanager
def noting_signals() -> Iterator[Callable[[], int]]:
    """Have SIGINT, SIGTERM and SIGHUP (unless it is ignored, as under nohup) leave a note while no trainer runs, in
    place of ending us in the middle of what is recorded of it. Yields what gives the first that came, 0 for none.

    A second one does what it did before: what is recorded may wait for storage that hangs.
    """
    first, first_at = 0, 0.0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal first, first_at
        if not first:
            first, first_at = signum, time.monotonic()
        elif signum != signal.SIGHUP and time.monotonic() - first_at >= SECOND_THOUGHT_SECONDS:
            before = previous[signal.Signals(signum)]
            signal.signal(signum, before)
            if callable(before):
                before(signum, frame)
            else:
                os.kill(os.getpid(), signum)

    previous = _handle(note)
    try:
        yield lambda: first
    finally:
        for name, handler in previous.items():
            if signal.getsignal(name) is note:  # run_trainer leaves them ignored where it was interrupted
                signal.signal(name, handler)


def wait_or_signal(seconds: float, noted: Callable[[], int]) -> bool:
    """Wait; True as soon as `noting_signals` has a note."""
    end = time.monotonic() + seconds
    while not noted() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, POLL_SECONDS))
    return bool(noted())


def _handle(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Have a handler for the signals that ask us to end; returns those of before."""
    previous = {name: signal.getsignal(name) for name in _SIGNALS}
    for name, before in previous.items():
        # Under nohup a hang-up stays ignored. A shell's `command &` ignores SIGINT, but who sends one there means it.
        if name != signal.SIGHUP or before is not signal.SIG_IGN:
            signal.signal(name, handler)
    return previous


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
