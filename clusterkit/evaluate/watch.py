"""`clusterkit eval --watch DIR`: every checkpoint is scored as it appears, and the curve is drawn anew."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from clusterkit.backends.base import Say
from clusterkit.evaluate.process import require_evaluator, run_evaluation
from clusterkit.ui import output
from evaluation.config import EvalConfig
from evaluation.steps import checkpoints_in
from trainer.errors import RunError, UserError

LOOK_SECONDS = 5.0


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
    """
    if not folder.is_dir():
        raise UserError(
            f"--watch {folder}: there is no such folder: name one with checkpoints, such as RUN/checkpoints"
        )
    require_evaluator()
    stop = _Stop()
    done: set[Path] = set()
    failed: list[str] = []
    told = False
    while not stop.wanted:
        fresh = [path for path in checkpoints_in(folder) if path not in done]
        for checkpoint in fresh:
            if stop.wanted:
                return
            done.add(checkpoint)
            config = request(str(checkpoint))
            say(f"scoring {checkpoint}")
            try:
                show(run_evaluation(config, say).folder)
            except (RunError, OSError) as error:
                failed.append(checkpoint.name)
                output.error(f"{checkpoint.name}: {error}")
        if once:
            if failed:
                raise RunError(f"{len(failed)} checkpoints could not be scored: {', '.join(failed)}")
            if not done:
                raise UserError(f"--watch {folder}: there is no checkpoint (epoch…globalstepN) below it yet")
            return
        if not told:
            say(f"waiting for checkpoints below {folder}; Ctrl-C ends it")
            told = True
        stop.wait(LOOK_SECONDS)


class _Stop:
    """Ctrl-C between two evaluations; during one it is the evaluation's."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, _number: int, _frame: FrameType | None) -> None:
        self.wanted = True

    def wait(self, seconds: float) -> None:
        """Wait, but not longer than until it is set."""
        end = time.monotonic() + seconds
        while not self.wanted and time.monotonic() < end:
            time.sleep(0.1)
