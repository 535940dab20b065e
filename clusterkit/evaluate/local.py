"""Evaluations in a process of this machine, of one checkpoint or of each one as it appears (`--watch-dir`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.base import Backend, Say, folder_of_runs
from clusterkit.backends.local.jobs import owner_of
from clusterkit.backends.local.stop import send_signal
from clusterkit.evaluate.process import Finished, require_evaluator, run_evaluation
from clusterkit.evaluate.request import (
    EvalArguments,
    SubmittedEval,
    checkpoint_here,
    default_names,
    make_request,
    run_settings,
)
from clusterkit.runs.directory import lock_holder
from clusterkit.ui import output
from evaluation.config import EvalConfig
from evaluation.record import LOCK
from evaluation.results import find_results
from evaluation.watching import watch
from trainer.assets import resolve_model
from trainer.config import RunConfig
from trainer.errors import RunError, UserError
from trainer.signals import StopFlag

STOP_SECONDS = 120
POLL_SECONDS = 0.2


class LocalEvaluator:
    """`clusterkit.evaluate.table.Evaluator` of this machine."""

    def __init__(self, backend: Backend) -> None:
        self._say = backend.say

    def plan(self, arguments: EvalArguments) -> EvalConfig:
        """See `Evaluator.plan`."""
        return self._request(arguments, checkpoint_here(arguments.model_path, folder_of_runs(arguments.fileroot)))

    def require(self) -> None:
        """See `Evaluator.require`."""
        require_evaluator()

    def start(self, arguments: EvalArguments, *, detach: bool) -> None:  # noqa: ARG002 (`follow` starts it)
        """See `Evaluator.start`."""
        if detach:
            raise UserError("--detach belongs to --cluster: an evaluation of this machine ends with its command")

    def follow(
        self,
        arguments: EvalArguments,
        submitted: SubmittedEval | None,  # noqa: ARG002 (there is none)
        show: Callable[[Path], None],
    ) -> Finished | None:
        """See `Evaluator.follow`."""
        if arguments.watch:
            folder = Path(arguments.watch).expanduser().absolute()
            watch_folder(folder, lambda path: self._request(arguments, path), self._say, show, once=arguments.once)
            return None
        config = self.plan(arguments)
        require_evaluator()
        return run_evaluation(config, self._say)

    def results(self, output_path: str) -> Path:
        """See `Evaluator.results`."""
        return find_results(output_path)

    def stop(self, output_path: str, user: str) -> str:
        """See `Evaluator.stop`."""
        lock = Path(output_path).expanduser().absolute() / LOCK
        name = lock_holder(lock) or ""
        if not (number := name.removeprefix("process ")).isdigit():
            raise RunError(f"no evaluation of this machine writes into {lock.parent}")
        if (owner := owner_of(lock)) != user:
            raise UserError(f"the evaluation that writes into {lock.parent} is {owner}'s: --user {owner}")
        send_signal(int(number), lock, signal.SIGTERM)
        self._say(f"{name} ends its servers")
        end = time.monotonic() + STOP_SECONDS
        while lock_holder(lock) == name:
            if time.monotonic() > end:
                raise RunError(f"{name} has not ended within {STOP_SECONDS} s")
            time.sleep(POLL_SECONDS)
        return f"{name} is stopped: what is answered is written, and the same command goes on"

    def _request(self, arguments: EvalArguments, checkpoint: str) -> EvalConfig:
        trained = run_settings(checkpoint, arguments.preset)
        names = [_absolute(n) if "/" in n or n.endswith(".jsonl") else n for n in arguments.data_names]
        values = {
            **arguments.values,
            "model_path": checkpoint,
            "output_path": _absolute(arguments.output_path),
            "data_names": names or self._default_names(trained, checkpoint, arguments),
            "data_path": _data_path(arguments.data_path),
            "cache_dir": arguments.cache_dir,
            "compare": [_absolute(folder) for folder in arguments.compare],
        }
        return make_request(values, trained, arguments.settings)

    @staticmethod
    def _default_names(trained: RunConfig | None, checkpoint: str, arguments: EvalArguments) -> list[str]:
        if trained is None:  # that it is no checkpoint is to be told before what is missing besides
            try:
                resolve_model(checkpoint, arguments.cache_dir)
            except UserError as error:
                raise UserError(str(error).replace("model.path=", "--model-path ")) from error
        return default_names(trained)


def _data_path(typed: str) -> str:
    if typed and not Path(typed).expanduser().exists():
        raise UserError(f"--data-path {typed}: there is no such folder")
    return _absolute(typed)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def watch_folder(
    folder: Path, request: Callable[[str], EvalConfig], say: Say, show: Callable[[Path], None], *, once: bool
) -> None:
    """Score what is there, oldest first, then what comes, until it is interrupted; one that fails is told and passed.

    Args:
        request: makes the evaluation of a checkpoint.

    Raises:
        UserError: there is no such folder, or a checkpoint cannot be asked for. RunError: with `once`, some failed.
        InterruptedRunError: by a signal.
    """
    if not folder.is_dir():
        raise UserError(
            f"--watch-dir {folder}: there is no such folder: name one with checkpoints, such as RUN/checkpoints"
        )
    require_evaluator()

    def score(checkpoint: Path) -> int:
        say(f"scoring {checkpoint}")
        try:
            show(run_evaluation(request(str(checkpoint)), say).folder)
        except (RunError, OSError) as error:
            output.error(f"{checkpoint.name}: {error}")
            return 1
        return 0

    if not once:
        say(f"every checkpoint below {folder} is scored, also those to come; Ctrl-C ends it")
    scored, failed = watch(folder, score, StopFlag().install(), lambda **_: None, lambda: once)
    if failed:
        raise RunError(f"{len(failed)} checkpoints could not be scored: {', '.join(failed)}")
    if not scored:
        raise UserError(f"--watch-dir {folder}: there is no checkpoint (epoch…globalstepN) below it yet")
