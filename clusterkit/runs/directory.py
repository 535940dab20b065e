"""Where a run lies under fileroot, which runs there are, and whether one of them is alive."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.disk import file_failures
from trainer.locks import HeldError, hold

TRIAL_NAME = re.compile(r"^run(\d+)$")
FILEROOT = "choose another folder with --fileroot DIR"
"""The way out where runs cannot be written."""
HOLDER_FILE = ".holder"
"""In the copy of a run of other machines: who works on it there. Locks say nothing over here."""


def user_name() -> str:
    """The login name, or the number of a user that has none (containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def goes_on(has_recover_checkpoint: bool) -> str:
    """What the same train command does after a stop, as the end of a sentence."""
    if has_recover_checkpoint:
        return "the same train command goes on from its recover checkpoint"
    return "it has written no recover checkpoint to go on from"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run; docs/run-directory.md says what is in them."""

    fileroot: Path
    user: str
    experiment: str
    trial: str

    @property
    def logs(self) -> Path:
        """Folder of config, log and metrics."""
        return self.fileroot / "logs" / self.user / self.experiment / self.trial

    @property
    def checkpoints(self) -> Path:
        """Folder of the persistent checkpoints."""
        return self.fileroot / "checkpoints" / self.user / self.experiment / self.trial

    @property
    def recover(self) -> Path:
        """Folder of the recover checkpoints."""
        return self.fileroot / "recover" / self.user / self.experiment / self.trial

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.logs / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Every number."""
        return self.logs / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """The closing table."""
        return self.logs / "summary.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.logs / "tensorboard"

    @property
    def has_recover_checkpoint(self) -> bool:
        """Whether there is a recover checkpoint to go on from."""
        return (self.recover / "LATEST").exists()

    @property
    def goes_on(self) -> str:
        """What the same train command does after a stop, as the end of a sentence."""
        return goes_on(self.has_recover_checkpoint)

    def attempt_numbers(self) -> list[int]:
        """Numbers of the attempts that were started, in order."""
        names = [path.name.removeprefix("attempt_") for path in self.logs.glob("attempt_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def console(self, attempt: int) -> Path:
        """What the trainer printed in that attempt."""
        return self.logs / f"attempt_{attempt}" / "console.log"

    def exit_mark(self, attempt: int) -> Path:
        """How that attempt ended, as whoever had started it saw it."""
        return self.logs / f"attempt_{attempt}" / "exit.json"

    def ended_by(self, attempt: int) -> str:
        """The signal that ended an attempt, such as `SIGKILL`; "" where none did, or nobody saw it."""
        try:
            code = json.loads(self.exit_mark(attempt).read_text(encoding="utf-8"))["code"]
            return signal.Signals(-code).name if code < 0 else ""
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def killed_command(run: RunDirectory) -> str | None:
    """ "process N" of the `clusterkit train` that was killed while its trainer goes on; None: there is no such thing.

    A command that ends by itself empties launch.lock; one that is killed leaves its number in it, and no lock.
    """
    if lock_holder(run.logs / "run.lock") is None or lock_holder(run.logs / "launch.lock") is not None:
        return None
    try:
        pid = (run.logs / "launch.lock").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
    return f"process {pid}" if pid.isdigit() else None


def runs(
    fileroot: Path, experiment: str | None = None, trial: str | None = None, user: str | None = None
) -> list[RunDirectory]:
    """Runs of a user, of this one when left out, under fileroot; the one with the latest sign of life last."""
    user = user or user_name()
    base = fileroot / "logs" / user
    found = [
        RunDirectory(fileroot, user, path.parent.name, path.name)
        for path in base.glob(f"{experiment or '*'}/{trial or '*'}")
        if path.is_dir()
    ]
    return sorted(found, key=lambda run: (_last_sign(run), run.experiment, run.trial))


def numbered_trials(fileroot: Path, experiment: str) -> list[int]:
    """Numbers N of the trials named runN, in order."""
    names = [TRIAL_NAME.match(run.trial) for run in runs(fileroot, experiment)]
    return sorted(int(match.group(1)) for match in names if match)


def lock_holder(path: Path) -> str | None:
    """ "process N" while another process holds an exclusive flock on the file, else None."""
    try:
        with path.open("rb") as file:
            try:
                # Shared, and given back at once: two readers must not take each other for a trainer.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = file.read(32).decode(errors="replace").strip()
                return f"process {pid}" if pid.isdigit() else "another process"
            return None
    except OSError:
        return None


@contextmanager
def hold_lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive flock with our process id in the file; yields False where another process holds it.

    Raises:
        UserError, RunError: the file cannot be made, locked or written.

    """
    with ExitStack() as stack:
        with file_failures(path, FILEROOT):
            file = stack.enter_context(path.open("a+b"))
            try:
                hold(file)
                ours = True
            except HeldError:
                ours = False
        yield ours
        if ours:
            with suppress(OSError):  # who reads it looks at the lock
                file.truncate(0)


def _last_sign(run: RunDirectory) -> float:
    times = [0.0]
    for path in (run.metrics, run.config, run.logs):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


@contextlib.contextmanager
def disk_errors(folder: Path, instead: str = FILEROOT) -> Iterator[None]:
    """Turn what the disk answers into a message about the folder. instead: how to choose another."""
    with file_failures(folder, instead):
        yield
