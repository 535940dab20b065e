"""Evaluations in a process of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.base import Say, folder_of_runs
from clusterkit.evaluate.process import Finished, require_evaluator, run_evaluation
from clusterkit.evaluate.request import (
    EvalArguments,
    SubmittedEval,
    choose_checkpoint,
    default_names,
    make_request,
    run_settings,
)
from clusterkit.evaluate.watch import watch_folder
from evaluation.config import EvalConfig
from trainer.errors import UserError


class LocalEvaluator:
    """Runs evaluations on this machine; `ClusterEvaluator` has the same methods for a cluster."""

    def __init__(self, say: Say) -> None:
        self._say = say

    def plan(self, arguments: EvalArguments) -> EvalConfig:
        """What would be asked; nothing is copied or started.

        Raises:
            UserError: a checkpoint or data that are not there, or a setting that is not allowed.
        """
        return self._request(arguments, choose_checkpoint(arguments.model_path, folder_of_runs(arguments.fileroot)))

    def require(self) -> None:
        """Refuse where the place lacks what evaluations need."""
        require_evaluator()

    def start(self, arguments: EvalArguments, *, detach: bool) -> None:  # noqa: ARG002 (`follow` starts it)
        """Start the evaluation, or attach to it, where it goes on without us; None where `follow` is what evaluates.

        Raises:
            UserError: as `plan`; the place cannot be detached from. RunError: it refuses, or a copy failed.
        """
        if detach:
            raise UserError("--detach belongs to --cluster: an evaluation of this machine ends with its command")

    def follow(
        self,
        arguments: EvalArguments,
        submitted: SubmittedEval | None,  # noqa: ARG002 (there is none)
        show: Callable[[Path], None],
    ) -> Finished | None:
        """Show what the evaluation prints until it ends, with its results on this machine; None for a watch.

        Args:
            arguments: of the evaluation.
            submitted: what `start` has returned.
            show: gets the folder of every checkpoint's results that a watch has scored.

        Raises:
            UserError: with the subclass that fits how it ended.
        """
        if arguments.watch:
            folder = Path(arguments.watch).expanduser().absolute()
            watch_folder(folder, lambda path: self._request(arguments, path), self._say, show, once=arguments.once)
            return None
        config = self.plan(arguments)
        require_evaluator()
        return run_evaluation(config, self._say)

    def _request(self, arguments: EvalArguments, checkpoint: str) -> EvalConfig:
        trained = run_settings(checkpoint, arguments.preset)
        names = [_absolute(n) if "/" in n or n.endswith(".jsonl") else n for n in arguments.data_names]
        values = {
            **arguments.values,
            "model_path": checkpoint,
            "output_path": _absolute(arguments.output_path),
            "data_names": names or default_names(trained),
            "data_path": _data_path(arguments.data_path),
            "cache_dir": arguments.cache_dir,
            "compare": [_absolute(folder) for folder in arguments.compare],
        }
        return make_request(values, trained, arguments.settings)


def _data_path(typed: str) -> str:
    if typed and not Path(typed).expanduser().exists():
        raise UserError(f"--data-path {typed}: there is no such folder")
    return _absolute(typed)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
