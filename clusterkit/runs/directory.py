"""The folders of runs below fileroot: their paths, the list of runs, and their locks."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.disk import file_failures
from trainer.errors import UserError
from trainer.locks import HeldError, hold
from trainer.paths import SUPERVISED
from trainer.paths import user_name as user_name  # noqa: PLC0414 (readers of runs have it from here)

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast, where PyYAML was built with it: lists of runs read hundreds of configurations."""
TRIAL_NAME = re.compile(r"^run(\d+)$")
RUNS = "runs"
"""Folder of this machine's runs where --fileroot names none."""
FILEROOT = "choose another folder with --fileroot FOLDER"
"""Advice for errors about folders of runs."""
FIRST_SETTING, LAST_SECTION = "preset", "monitor"
"""Of the trainer's config.yaml: one that has the first and not the last has lost its end. AReaL's has neither."""
HOLDER_FILE = ".holder"
"""File in the local copy of a remote run that names the process that works on it: locks say nothing over here."""

CLOCK_FILE = ".clock"
"""File in the local copy of a remote run: the seconds by which the clock there is ahead of this machine's."""


def folder_of_runs(fileroot: str | None) -> Path:
    """Return where this machine's runs are, for --fileroot as typed."""
    return Path(fileroot or RUNS).expanduser().absolute()


def resume_hint(has_recover_checkpoint: bool, keeps_supervised: bool = False, in_warmup: bool = False) -> str:
    """Return what the same train command does after a stop, as the end of a sentence."""
    if has_recover_checkpoint:
        return "the same train command goes on from its recover checkpoint"
    if keeps_supervised:
        return "the same train command goes on with its supervised start"
    if in_warmup:
        return "the same train command goes on with what is kept of its warm-up"
    return "it has written no recover checkpoint to go on from"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run; docs/run-directory.md describes the files."""

    fileroot: Path
    user: str
    experiment: str
    trial: str

    @property
    def name(self) -> str:
        """EXPERIMENT/TRIAL."""
        return f"{self.experiment}/{self.trial}"

    @property
    def word(self) -> str:
        """Its name as one word of a command that is printed."""
        return shlex.quote(self.name)

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
        """All numbers of the run."""
        return self.logs / "metrics.jsonl"

    @property
    def before(self) -> Path:
        """What was measured before its first step."""
        return self.logs / "before.json"

    @property
    def summary(self) -> Path:
        """The table of the final evaluation."""
        return self.logs / "summary.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.logs / "tensorboard"

    @property
    def has_recover_checkpoint(self) -> bool:
        """Whether there is a recover checkpoint to go on from."""
        return self.what_is_kept[0].exists()

    @property
    def what_is_kept(self) -> tuple[Path, Path, Path]:
        """Files that say: it has a recover checkpoint, its supervised start has one, its supervised start is done."""
        latest = "LATEST"
        return self.recover / latest, self.recover / SUPERVISED / latest, self.logs / SUPERVISED / "start.json"

    @property
    def has_supervised_checkpoint(self) -> bool:
        """Whether its supervised start is done."""
        return self.what_is_kept[2].exists()

    @property
    def keeps_supervised(self) -> bool:
        """Whether its supervised start is done, or has a recover checkpoint to go on from."""
        return any(path.exists() for path in self.what_is_kept[1:])

    def attempt_numbers(self) -> list[int]:
        """Return the numbers of the attempts that were started, in order."""
        names = [path.name.removeprefix("attempt_") for path in self.logs.glob("attempt_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def console(self, attempt: int) -> Path:
        """Return the file with what the trainer printed in that attempt."""
        return self.logs / f"attempt_{attempt}" / "console.log"

    def exit_mark(self, attempt: int) -> Path:
        """Return the file that says how that attempt ended, written by the process that started it."""
        return self.logs / f"attempt_{attempt}" / "exit.json"

    @property
    def has_ended(self) -> bool:
        """Whether the last attempt has left the mark of its end, or there was none."""
        numbers = self.attempt_numbers()
        return not numbers or self.exit_mark(numbers[-1]).exists()

    def exit_code(self, attempt: int) -> int | None:
        """Return how that attempt ended, negative for a signal; None where it is unknown."""
        try:
            return int(self._exit(attempt)["code"])
        except (ValueError, KeyError, TypeError):
            return None

    def _exit(self, attempt: int) -> dict[str, Any]:
        """Return what its mark says of an attempt's end; empty where it has none."""
        try:
            found = json.loads(self.exit_mark(attempt).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def ended_by(self, attempt: int) -> str:
        """Return the signal that ended an attempt, such as `SIGKILL`; empty if none did or it is unknown."""
        code = self.exit_code(attempt) or 0
        try:
            return signal.Signals(-code).name if code < 0 else ""
        except ValueError:
            return ""

    @property
    def died_stopping(self) -> bool:
        """Whether a signal ended the newest attempt after it had been told to stop: what it then did is lost."""
        last = (self.attempt_numbers() or [0])[-1]
        return bool(self.ended_by(last)) and self._exit(last).get("stopping") is True

    @property
    def ended_command(self) -> str:
        """Return the command of the newest attempt, where it has left the mark of its end; else nothing."""
        return str(self._exit((self.attempt_numbers() or [0])[-1]).get("command") or "")

    @property
    def is_refused(self) -> bool:
        """Whether the newest attempt ended because of its settings or files: unchanged, the next one ends so, too."""
        return self.exit_code((self.attempt_numbers() or [0])[-1]) == UserError.exit_code and not self.restart_waits

    @property
    def restart_waits(self) -> bool:
        """Whether another attempt was to follow the newest one: it waits, unless its command or job was killed then."""
        return self._exit((self.attempt_numbers() or [0])[-1]).get("restart_s") is not None

    @property
    def clock_ahead(self) -> float:
        """Seconds by which the clock that the run's records have their times from is ahead of this machine's."""
        try:
            return float((self.logs / CLOCK_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0.0

    def measured_before(self) -> list[dict[str, Any]]:
        """Return the lines of the closing table as they were measured before the first step; empty without any."""
        try:
            found = json.loads(self.before.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [line for line in (found if isinstance(found, list) else [found]) if isinstance(line, dict)]

    def saved_values(self) -> dict[str, Any]:
        """Return the values of config.yaml, with which the run was last started; empty if it cannot be read."""
        return self.read_config()[0]

    def config_problem(self) -> str:
        """Return what is wrong with config.yaml and what to do; empty where it is whole or missing."""
        return self.read_config()[1]

    def read_config(self) -> tuple[dict[str, Any], str]:
        """Return `saved_values` and `config_problem`."""
        values, problem = self._parsed_config()
        return values, f"{self.config} {problem}" if problem else ""

    def _parsed_config(self) -> tuple[dict[str, Any], str]:
        try:
            values = yaml.load(self.config.read_text(encoding="utf-8"), Loader=_LOADER)
        except FileNotFoundError:
            return {}, ""
        except IsADirectoryError:
            return {}, _damaged("it is a folder")
        except OSError as error:
            return {}, f"cannot be read ({error.strerror}): make it readable"
        except (ValueError, yaml.YAMLError):
            return {}, _damaged("it is not YAML, or cut off")
        if not isinstance(values, dict) or not values:
            return {}, _damaged("it holds no settings")
        cut = FIRST_SETTING in values and LAST_SECTION not in values
        return values, _damaged(f"it is cut off: there is no {LAST_SECTION} in it") if cut else ""


def _damaged(reason: str) -> str:
    return f"is damaged ({reason}): move it away, and the same train command writes it anew"


def killed_launcher(run: RunDirectory) -> str | None:
    """Return "process N" of a `clusterkit train` that was killed while its trainer goes on; None if there is none.

    A command that ends by itself empties launch.lock. One that is killed leaves its number there, without the lock.
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
    """Return the runs of a user (None: of this one) below fileroot; the one that was started last comes last."""
    user = user or user_name()
    base = fileroot / "logs" / user
    found = [
        RunDirectory(fileroot, user, path.parent.name, path.name)
        for path in base.glob(f"{experiment or '*'}/{trial or '*'}")
        if os.path.isdir(path)  # noqa: PTH112 (no error where it may not be looked at)
    ]
    return sorted(found, key=lambda run: (last_start(run), run.experiment, run.trial))


def require_listable(fileroot: Path, user: str | None = None) -> None:
    """Raise PermissionError where a user's runs (None: this one's) may not be listed, which `runs` takes for none."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(fileroot / "logs" / (user or user_name())):
        pass


def numbered_trials(fileroot: Path, experiment: str) -> list[int]:
    """Return the numbers N of the trials named runN, in order."""
    names = [TRIAL_NAME.match(run.trial) for run in runs(fileroot, experiment)]
    return sorted(int(match.group(1)) for match in names if match)


def lock_holder(path: Path) -> str | None:
    """Return "process N" while another process holds an exclusive flock on the file, else None."""
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
    """Hold an exclusive flock, with our process id in the file; yield False if another process holds it.

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
            with suppress(OSError):  # readers look at the lock first
                file.truncate(0)


def last_start(run: RunDirectory) -> float:
    """Unix seconds of a run's last start, which wrote its configuration; without one those of its folder, else 0."""
    for path in (run.config, run.logs):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0
