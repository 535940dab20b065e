"""Run an evaluation in a process of its own and show what it says."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from clusterkit.launch import disk_errors, run_trainer
from evaluation.config import EvalConfig
from trainer.errors import InterruptedRunError, RunError, UserError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finished:
    """An evaluation that has ended. folder: of its results; complete: every answer is there."""

    folder: Path
    complete: bool

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        return dict(json.loads((self.folder / "results.json").read_text(encoding="utf-8")))


def require_evaluator() -> None:
    """Refuse early, with the way out, where the evaluation's packages are not installed."""
    missing = [name for name in ("torch", "transformers", "math_verify") if not find_spec(name)]
    if missing:
        raise UserError(
            f"evaluating needs {', '.join(missing)}, which this Python ({sys.executable}) does not have: "
            "pip install 'clusterkit[train,eval]'"
        )


def run_evaluation(config: EvalConfig, say: Say, debug: bool = False) -> Finished:
    """Run it to its end; Ctrl-C ends it in order, and the same command goes on.

    Raises:
        UserError: with the subclass that fits how it ended; the message is the evaluation's own.

    """
    output = Path(config.output_path)
    logs = output / "logs"
    with disk_errors(output):
        logs.mkdir(parents=True, exist_ok=True)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        request, console = logs / f"{name}.yaml", logs / f"{name}.log"
        request.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True), encoding="utf-8")
        console.touch()
    shown = _Tail(console, say)
    argv = [sys.executable, "-P", "-m", "evaluation", str(request), *(["--debug"] if debug else [])]
    ending = run_trainer(argv, console, 0, shown.more, lambda: say("stopping: what is answered is written"))
    told = shown.error
    if ending.returncode in (0, 1) and shown.answer is not None:
        return Finished(Path(shown.answer["results"]), shown.answer["status"] == "complete")
    if ending.returncode == InterruptedRunError.exit_code or (ending.interrupts and ending.returncode < 0):
        raise InterruptedRunError(told or "interrupted: what is answered is written; the same command goes on")
    if ending.returncode == UserError.exit_code and told:
        raise UserError(told)
    raise RunError(told or f"the evaluation ended with code {ending.returncode} and no message; its log is {console}")


class _Tail:
    """Hands on the lines of a log as they come, but for the last word to the caller and the error."""

    def __init__(self, path: Path, say: Say) -> None:
        self.path, self.say = path, say
        self.answer: dict[str, Any] | None = None
        self.error = ""
        self._read = 0
        self._rest = ""

    def more(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._rest = (self._rest + data.decode("utf-8", "replace")).split("\n")
        for line in lines:
            if line.startswith('{"results": '):
                self.answer = json.loads(line)
            elif line.startswith("error: "):
                self.error = line.removeprefix("error: ")
            elif self.error:
                self.error += f"\n{line}"
            else:
                self.say(line)
