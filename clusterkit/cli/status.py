"""`clusterkit status`: how a run on this machine is doing, or any run whose log is at hand."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterkit.cli.target import (
    FILEROOT_OPTION,
    HERE_OPTION,
    USER_OPTION,
    Kind,
    checked_user,
    cluster_of_run,
    folder_of_runs,
    kind_for,
)
from clusterkit.ui import output
from trainer.errors import RunError, UserError

if TYPE_CHECKING:
    from clusterkit.runs.directory import RunDirectory
    from clusterkit.runs.log.view import LogView
    from clusterkit.runs.status import Status

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

WATCH_SECONDS = 2.0
MISSING_LOOKS = 5
"""A log that is being rotated is missing for a moment."""


@app.command()
def status(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON (with --watch: one line per observation)."),
    watch: bool = typer.Option(False, "--watch", help="Go on showing it until the run ends or Ctrl-C."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="A run on that cluster, and the cluster: hosts, Ray, storage, job."
    ),
    here: bool = HERE_OPTION,
    user: str | None = USER_OPTION,
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Read this log instead: AReaL's of any version, or ours; - for stdin."
    ),
) -> None:
    """Show how a run is doing: step, reward trend, ETA, checkpoints, and whether it is alive.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Exit codes for scripts: 0 all is well, 1 the run failed, was killed or stands still (or
    there is none); on a cluster also 3, something could not be seen or is missing.
    """
    if log is not None:
        if experiment or trial:
            raise UserError("--log FILE names the log itself: leave --experiment and --trial out")
        _log_status(Path(log), as_json, watch)
        return
    whose = checked_user(user)
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if cluster is not None:
        _cluster_status(cluster, whose, experiment, trial, as_json, watch)
        return
    from clusterkit.runs.diagnose.model import BAD  # noqa: PLC0415
    from clusterkit.runs.status import find_run, observe  # noqa: PLC0415
    from clusterkit.ui.run_status import status_lines  # noqa: PLC0415

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


def _facts(observed: Status) -> dict[str, Any]:
    from clusterkit.runs.diagnose.view import findings_of  # noqa: PLC0415

    return {**observed.as_dict(), "diagnosis": findings_of(observed)}


def _log_status(path: Path, as_json: bool, watch: bool) -> None:
    from clusterkit.runs.log.reader import MissingLogError, cache_folder, log_reader  # noqa: PLC0415
    from clusterkit.runs.log.stream import StreamReader  # noqa: PLC0415
    from clusterkit.runs.log.text import log_lines  # noqa: PLC0415

    reader = log_reader(path, cache_folder())
    piped = watch and isinstance(reader, StreamReader)

    def look() -> LogView:
        return reader.refresh(WATCH_SECONDS) if piped and isinstance(reader, StreamReader) else reader.refresh()

    with contextlib.ExitStack() as stack:
        show = _live_screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
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


def _watch(run: RunDirectory, as_json: bool) -> Status:
    """Show it until it ends; how it was then."""
    from clusterkit.runs.status import observe  # noqa: PLC0415
    from clusterkit.ui.run_status import status_lines  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        show = output.result if as_json or not sys.stdout.isatty() else _live_screen(stack)
        while True:
            observed = observe(run, time.time())
            if as_json:
                output.line_json(_facts(observed))
            else:
                show("\n".join(status_lines(observed)))
            if not observed.alive:
                return observed
            time.sleep(WATCH_SECONDS)


def _cluster_status(
    cluster: str, user: str, experiment: str | None, trial: str | None, as_json: bool, watch: bool
) -> None:
    import asyncio  # noqa: PLC0415

    from clusterkit.backends.ray.status import watching  # noqa: PLC0415
    from clusterkit.backends.ray.view import cluster_lines  # noqa: PLC0415
    from clusterkit.ssh.host_options import HostOptions  # noqa: PLC0415
    from clusterkit.ssh.selection import select  # noqa: PLC0415

    async def look() -> int:
        async with watching(select(HostOptions(cluster=cluster)), experiment, trial, user) as eye:
            with contextlib.ExitStack() as stack:
                show = _live_screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
                while True:
                    seen = await eye.look()
                    if not as_json:
                        show("\n".join(cluster_lines(seen)))
                    elif watch:
                        output.line_json(seen.as_dict())
                    else:
                        output.result_json(seen.as_dict())
                    if not watch or (seen.run is not None and not seen.run.alive and not seen.unseen):
                        return seen.exit_code
                    await asyncio.sleep(WATCH_SECONDS)

    if code := asyncio.run(look()):
        raise typer.Exit(code)


def _live_screen(stack: contextlib.ExitStack) -> Callable[[str], None]:
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    live = stack.enter_context(Live(console=Console(), auto_refresh=False))
    return lambda text: live.update(Text(text), refresh=True)
