"""Run an evaluation in a process of its own and show what it says."""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml

from clusterkit.backends.base import Say
from clusterkit.backends.local.interpreter import missing_packages, python_here
from clusterkit.backends.local.launch import run_trainer
from clusterkit.ui import output
from evaluation.config import EvalConfig
from trainer.disk import file_failures
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.staging import nothing_if_refused


@dataclass(frozen=True)
class Finished:
    """An evaluation that has ended."""

    folder: Path
    complete: bool

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        return dict(json.loads((self.folder / "results.json").read_text(encoding="utf-8")))


def require_evaluator() -> None:
    """Refuse early, with the way out, where the evaluation's packages are not installed."""
    python = python_here()
    if missing := missing_packages(python, ("torch", "transformers", "math_verify", "evaluation")):
        if python != sys.executable:
            raise UserError(f"evaluating on GPUs needs {', '.join(missing)}, which {python} lacks: run make gpu again")
        raise UserError(
            f"evaluating needs {', '.join(missing)}, which this Python ({python}) does not have: "
            "pip install 'clusterkit[train,eval]'"
        )


def run_evaluation(config: EvalConfig, say: Say) -> Finished:
    """Run it to its end; Ctrl-C ends it in order, and the same command goes on.

    Raises:
        UserError: with the subclass that fits how it ended; the message is the evaluation's own.
    """
    folder = Path(config.output_path)
    logs = folder / "logs"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    request, console = logs / f"{name}.yaml", logs / f"{name}.log"
    parser = EvalOutputParser(say)
    with nothing_if_refused(logs) as made:
        made.extend([request, console])
        with file_failures(folder, "choose another --out"):
            logs.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
            request.write_text(text, encoding="utf-8")
            console.touch()
        answers = _answers(folder)
        code = run_node(
            ["evaluation", str(request)], console, parser.feed, lambda: say("stopping: what is answered is written")
        )
        if _answers(folder) != answers:
            made.clear()  # what it was asked belongs to them
        said = f"the evaluation ended with code {code} and no message; its log is {console}"
        return parser.finished(code, None, said)


def _answers(folder: Path) -> dict[Path, int]:
    """Bytes of the answers in an output folder, by file."""
    return {path: path.stat().st_size for path in folder.glob("records/*/samples.jsonl")}


def run_node(
    module: Sequence[str], console: Path, feed: Callable[[bytes], None], on_interrupt: Callable[[], None]
) -> int:
    """Run a module of the node's code to its end.

    Args:
        module: its name and its arguments.
        feed: gets what it prints, as it comes.
        on_interrupt: called after the first signal, which is handed on to it.

    Returns:
        Its exit code; that of an interruption where our signal has ended it.
    """
    argv = [python_here(), "-P", "-m", *module, *(["--debug"] if output.debug else [])]
    ending = run_trainer(argv, console, 0, _Tail(console, feed).more, on_interrupt)
    return InterruptedRunError.exit_code if ending.interrupts and ending.returncode < 0 else ending.returncode


def failure_of(exit_code: int, error: str, interrupted: str, without_words: str) -> UserError:
    """The error of a process of the node's code that has failed.

    Args:
        error: its own message, empty where it has none.
        interrupted: the message where it was interrupted before it could say so.
        without_words: the message where it has said nothing.
    """
    if exit_code == InterruptedRunError.exit_code:
        return InterruptedRunError(error or interrupted)
    if exit_code == UserError.exit_code and error:
        return UserError(error)
    return RunError(error or without_words)


class OutputParser(ABC):
    """What a process of the node's code prints: its results are taken, its error is kept, other lines are handed on.

    Attributes:
        error: the message that the process ended with.
    """

    RESULT: ClassVar[str]
    """How a line of JSON with a result begins."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take what was printed since."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self.take(line.decode("utf-8", "replace"))

    def take(self, line: str) -> None:
        """Take a line."""
        if line.startswith(self.RESULT):
            self.take_result(json.loads(line))
        elif line.startswith("error: "):
            self.error = line.removeprefix("error: ")
        elif self.error:
            self.error += f"\n{line}"
        else:
            self.say(line)

    @abstractmethod
    def take_result(self, result: dict[str, Any]) -> None:
        """Take a result."""


class EvalOutputParser(OutputParser):
    """What an evaluation prints; keeps its last word."""

    RESULT = '{"results": '

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.answer: dict[str, Any] | None = None

    def take_result(self, result: dict[str, Any]) -> None:
        """See OutputParser."""
        self.answer = result

    def finished(self, exit_code: int, folder: Path | None, without_words: str) -> Finished:
        """The evaluation's end, from its exit code and its own words.

        Args:
            folder: of the results, where they were copied to; None for the one that it names.
            without_words: the error message where it has said nothing.

        Raises:
            UserError: with the subclass that fits; the message is the evaluation's own, or `without_words`.
        """
        if exit_code in (0, 1) and self.answer is not None:
            return Finished(folder or Path(self.answer["results"]), self.answer["status"] == "complete")
        interrupted = "interrupted: what is answered is written; the same command goes on"
        raise failure_of(exit_code, self.error, interrupted, without_words)


class WatchOutputParser(EvalOutputParser):
    """What a watch over checkpoints prints: lines are handed on, what was scored waits in `scored` to be copied."""

    def __init__(self, say: Say) -> None:
        super().__init__(say)
        self.scored: deque[str] = deque()
        self._codes: dict[str, int] = {}  # by checkpoint: one that is replaced is scored again

    @property
    def failed(self) -> list[str]:
        """Names of the checkpoints that have no scores."""
        return [Path(checkpoint).name for checkpoint, code in self._codes.items() if code]

    @property
    def refused(self) -> bool:
        """Whether no checkpoint's evaluation was more than refused."""
        return set(self._codes.values()) <= {UserError.exit_code}

    @property
    def count(self) -> int:
        """How many checkpoints were scored, or could not be."""
        return len(self._codes)

    def take(self, line: str) -> None:
        """Take a line; what one evaluation says of its error is one of many."""
        if line.startswith('{"watch": '):
            self._event(json.loads(line))
        elif line.startswith('{"results": '):
            super().take(line)
        else:
            self.error = line.removeprefix("error: ") if line.startswith("error: ") else self.error
            self.say(line)

    def _event(self, event: dict[str, Any]) -> None:
        name = Path(event.get("checkpoint", "")).name
        if event["watch"] == "scoring":
            self.answer = None
            self.say(f"scoring {name}")
        elif event["watch"] == "lost":
            self.say(f"the evaluation was lost: {event['reason']}")
        elif event["watch"] != "ended":
            self._codes[event["checkpoint"]] = event["code"]
            if event["watch"] == "failed":
                self.say(f"{name} could not be scored (code {event['code']})")
            if self.answer is not None:  # an incomplete one has results, too
                self.scored.append(PurePosixPath(self.answer["results"]).name)


class _Tail:
    """Hands on what is appended to a log."""

    def __init__(self, path: Path, feed: Callable[[bytes], None]) -> None:
        self.path, self._feed = path, feed
        self._read = 0

    def more(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        self._feed(data)
