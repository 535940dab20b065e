"""`clusterkit eval --watch DIR`: every checkpoint is scored as it appears, and the curve is drawn anew."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from clusterkit.evaluate.pages import PAGE, write_pages
from clusterkit.evaluate.process import require_evaluator, run_evaluation
from clusterkit.ui import output
from evaluation.config import EvalConfig
from evaluation.results import RESULTS
from evaluation.steps import checkpoints_in
from trainer.errors import RunError, UserError

LOOK_SECONDS = 5.0


def watch_folder(
    folder: Path,
    request: Callable[[str], EvalConfig],
    shown: Callable[[str], None],
    *,
    once: bool,
    as_json: bool,
) -> None:
    """Score what is there, oldest first, then what comes, until it is interrupted; one that fails is told and passed.

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
            shown(f"scoring {checkpoint}")
            try:
                finished = run_evaluation(config, shown, output.debug)
                show_scored(finished.folder, as_json)
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
            shown(f"waiting for checkpoints below {folder}; Ctrl-C ends it")
            told = True
        stop.wait(LOOK_SECONDS)


def show_scored(folder: Path, as_json: bool) -> None:
    """Print the table of one checkpoint's results, and draw the curve anew."""
    write_pages(folder)
    if as_json:
        output.line_json(json.loads((folder / RESULTS).read_text(encoding="utf-8")))
    else:
        output.result((folder / "table.txt").read_text(encoding="utf-8").partition("\n\n")[0])
        output.note(f"The curve: {folder.parent / PAGE}")


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
