"""What evaluates at a place: the interface `Evaluator`, and which one a backend has."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Protocol

from clusterkit.backends.base import Backend
from clusterkit.evaluate.process import Finished
from clusterkit.evaluate.request import EvalArguments, SubmittedEval
from evaluation.config import EvalConfig, WatchConfig
from trainer.errors import UserError

EVALUATORS = {
    "local": ("clusterkit.evaluate.local", "LocalEvaluator"),
    "ray": ("clusterkit.evaluate.cluster", "ClusterEvaluator"),
}
"""Module, imported when it is used, and class by the mode of the place; the class is made from its entered backend."""


class Evaluator(Protocol):
    """Evaluates at a place."""

    def plan(self, arguments: EvalArguments) -> EvalConfig | WatchConfig:
        """What would be asked; nothing is copied or started.

        Raises:
            UserError: a checkpoint or data that are not there, or a setting that is not allowed.
        """

    def require(self) -> None:
        """Refuse where the place lacks what evaluations need."""

    def start(self, arguments: EvalArguments, *, detach: bool) -> SubmittedEval | None:
        """Start the evaluation, or attach to it, where it goes on without us; None where `follow` is what evaluates.

        Raises:
            UserError: as `plan`; the place cannot be detached from. RunError: it refuses, or a copy failed.
        """

    def follow(
        self, arguments: EvalArguments, submitted: SubmittedEval | None, show: Callable[[Path], None]
    ) -> Finished | None:
        """Show what the evaluation prints until it ends, with its results on this machine; None for a watch.

        Args:
            show: gets the folder of every checkpoint's results that a watch has scored.

        Raises:
            UserError: with the subclass that fits how it ended.
        """

    def results(self, output_path: str) -> Path:
        """The latest results of an output path, as a file of this machine. Raises UserError where there are none."""

    def stop(self, output_path: str, user: str) -> str:
        """End a user's evaluation that writes into an output path; how that went, as a sentence.

        Raises:
            UserError: it is ended in another way. RunError: none does, or it does not end.
        """


def evaluator_of(backend: Backend) -> Evaluator:
    """The evaluator of a backend that was entered. Raises UserError where its place has none."""
    if (entry := EVALUATORS.get(backend.place.mode)) is None:
        raise UserError(
            f"evaluations do not run as jobs {backend.where}: give sbatch the command itself, such as "
            "sbatch --gres=gpu:1 --wrap 'clusterkit eval --here …'"
        )
    module, name = entry
    evaluator: Evaluator = getattr(import_module(module), name)(backend)
    return evaluator
