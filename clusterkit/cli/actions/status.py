"""`clusterkit status` of a run on this machine, or of any run whose log is at hand."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from clusterkit.cli.actions.target import folder_of_runs
from clusterkit.runs.diagnose.model import BAD
from clusterkit.runs.diagnose.view import findings_of
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.log.reader import MissingLogError, cache_folder, log_reader
from clusterkit.runs.log.stream import StreamReader
from clusterkit.runs.log.text import log_lines
from clusterkit.runs.log.view import LogView
from clusterkit.runs.status import Status, find_run, observe
from clusterkit.ui import output
from clusterkit.ui.run_status import status_lines
from trainer.errors import RunError, UserError

WATCH_SECONDS = 2.0
MISSING_LOOKS = 5
"""A log that is being rotated is missing for a moment."""


def show(
    experiment: str | None, trial: str | None, fileroot: str | None, user: str | None, *, as_json: bool, watch: bool
) -> None:
    """Show a run of this machine, once or until it ends; exit code 1 where it is not well."""
    run = find_run(folder_of_runs(fileroot), experiment, trial, user)
    if watch:
        observed = _watch(run, as_json)
    else:
        observed = observe(run, time.time())
        if as_json:
            output.result_json(_facts(observed))
        else:
            output.result("\n".join(status_lines(observed)))
    if observed.state in BAD:
        raise typer.Exit(1)


def show_log(log: str, experiment: str | None, trial: str | None, *, as_json: bool, watch: bool) -> None:
    """Show the run that a log is of; exit code 1 where it failed."""
    if experiment or trial:
        raise UserError("--log FILE names the log itself: leave --experiment and --trial out")
    path = Path(log)
    reader = log_reader(path, cache_folder())
    piped = watch and isinstance(reader, StreamReader)

    def look() -> LogView:
        return reader.refresh(WATCH_SECONDS) if piped and isinstance(reader, StreamReader) else reader.refresh()

    with contextlib.ExitStack() as stack:
        show = live_screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
        view, missing = look(), 0
        while True:
            if as_json:
                (output.line_json if watch else output.result_json)(view.as_dict())
            elif view.state != "unknown" or (watch and not view.ended):
                show("\n".join(log_lines(view)))
            if not watch or view.ended:
                break
            if not piped:
                time.sleep(WATCH_SECONDS)
            try:
                view, missing = look(), 0
            except MissingLogError:
                missing += 1
                if missing > MISSING_LOOKS:
                    raise
    if view.state == "unknown":
        raise RunError("; ".join([view.message, *view.notes]))
    if view.state == "failed":
        raise typer.Exit(1)


def live_screen(stack: contextlib.ExitStack) -> Callable[[str], None]:
    """Put a text in the place of the one before, until the stack is left."""
    live = stack.enter_context(Live(console=Console(), auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)


def _facts(observed: Status) -> dict[str, Any]:
    return {**observed.as_dict(), "diagnosis": findings_of(observed)}


def _watch(run: RunDirectory, as_json: bool) -> Status:
    """Show it until it ends; how it was then."""
    with contextlib.ExitStack() as stack:
        show = output.result if as_json or not sys.stdout.isatty() else live_screen(stack)
        while True:
            observed = observe(run, time.time())
            if as_json:
                output.line_json(_facts(observed))
            else:
                show("\n".join(status_lines(observed)))
            if not observed.alive:
                return observed
            time.sleep(WATCH_SECONDS)
