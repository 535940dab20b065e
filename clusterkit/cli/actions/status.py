"""`clusterkit status`: a run and its place, or any run whose log is at hand."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run, selector_of
from clusterkit.cli.runoptions import RunOptions
from clusterkit.runs.log.reader import MissingLogError, cache_folder, log_reader
from clusterkit.runs.log.stream import StreamReader
from clusterkit.runs.log.text import log_lines
from clusterkit.runs.log.view import LogView
from clusterkit.ui import output
from clusterkit.ui.colour import coloured
from clusterkit.ui.width import fitted
from trainer.errors import RunError

WATCH_SECONDS = 2.0
MISSING_LOOKS = 5
"""A log that is being rotated is missing for a moment."""


def show(run: RunOptions, *, as_json: bool, watch: bool) -> None:
    """Show a run and its place, once or until nothing changes any more; the exit code says how they are."""
    selector = selector_of(run)
    with open_backend(place_of_run(run), output.note) as backend, contextlib.ExitStack() as stack:
        show = _screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
        while True:
            seen = backend.status(selector)
            if as_json:
                (output.line_json if watch else output.result_json)(seen.facts)
            else:
                show(fitted(seen.lines))
            if not watch or seen.over:
                break
            time.sleep(WATCH_SECONDS)
    if seen.exit_code:
        raise typer.Exit(seen.exit_code)


def show_log(log: str, run: RunOptions, *, as_json: bool, watch: bool) -> None:
    """Show the run that a log is of; exit code 1 where it failed."""
    run.require_no_run()
    path = Path(log)
    reader = log_reader(path, cache_folder())
    piped = watch and isinstance(reader, StreamReader)

    def look() -> LogView:
        return reader.refresh(WATCH_SECONDS) if piped and isinstance(reader, StreamReader) else reader.refresh()

    with contextlib.ExitStack() as stack:
        show = _screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
        view, missing = look(), 0
        while True:
            if as_json:
                (output.line_json if watch else output.result_json)(view.as_dict())
            elif view.state != "unknown" or (watch and not view.ended):
                show(fitted(log_lines(view)))
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


def _screen(stack: contextlib.ExitStack) -> Callable[[str], None]:
    """Put a text in the place of the one before, until the stack is left."""
    live = stack.enter_context(Live(console=Console(), auto_refresh=False))
    return lambda text: live.update(Text.from_ansi(coloured(text)), refresh=True)
