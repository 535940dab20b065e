"""`clusterkit eval --watch DIR` on this machine: every checkpoint is scored as it appears, and the curve drawn anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterkit.backends.base import Say
from clusterkit.evaluate.process import require_evaluator, run_evaluation
from clusterkit.ui import output
from evaluation.config import EvalConfig
from evaluation.watching import watch
from trainer.errors import RunError, UserError
from trainer.signals import StopFlag


def watch_folder(
    folder: Path, request: Callable[[str], EvalConfig], say: Say, show: Callable[[Path], None], *, once: bool
) -> None:
    """Score what is there, oldest first, then what comes, until it is interrupted; one that fails is told and passed.

    Args:
        folder: of the checkpoints.
        request: makes the evaluation of a checkpoint.
        say: gets what the evaluations print.
        show: gets the folder of every checkpoint's results.
        once: end after the checkpoints that are there.

    Raises:
        UserError: there is no such folder, or a checkpoint cannot be asked for. RunError: with `once`, some failed.
        InterruptedRunError: by a signal.
    """
    if not folder.is_dir():
        raise UserError(
            f"--watch {folder}: there is no such folder: name one with checkpoints, such as RUN/checkpoints"
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
        raise UserError(f"--watch {folder}: there is no checkpoint (epoch…globalstepN) below it yet")
