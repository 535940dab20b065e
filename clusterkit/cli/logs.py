"""`clusterkit logs`: what a run has logged, here or on a cluster."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterkit.cli.hostoptions import takes_hosts
from clusterkit.cli.target import (
    FILEROOT_OPTION,
    HERE_OPTION,
    USER_OPTION,
    Kind,
    checked_user,
    folder_of_runs,
    hosts_of_run,
    kind_for,
)
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output

if TYPE_CHECKING:
    from clusterkit.runs.directory import RunDirectory
    from clusterkit.runs.log.tail import Tail
    from clusterkit.ssh.selection import Selection

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

POLL_SECONDS = 1.0
_BLOCK = 1 << 20


@app.command()
@takes_hosts
def logs(
    *,
    hosts: HostOptions,
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    here: bool = HERE_OPTION,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on showing what is added, until Ctrl-C."),
    lines: int = typer.Option(200, "--lines", "-n", min=0, help="Begin with so many lines of its end; 0: with all."),
    console: bool = typer.Option(False, "--console", help="What the newest attempt printed, instead of main.log."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="What that rank of the newest attempt printed."),
    engine: str | None = typer.Option(
        None, "--engine", help="What that engine server printed: its name or number (clusterkit serve list)."
    ),
    user: str | None = USER_OPTION,
) -> None:
    """Print a run's log: main.log, or what an attempt, one of its ranks or an engine server printed.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which. Only your own runs, unless --user names somebody else.
    """
    whose = checked_user(user)
    there = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if there is None:
        from clusterkit.runs.status import find_run  # noqa: PLC0415

        run = find_run(folder_of_runs(fileroot), experiment, trial, user)
        numbers = run.attempt_numbers()
        _show_here(_file(run, numbers[-1] if numbers else 0, console, rank, engine), lines, follow)
        return
    import asyncio  # noqa: PLC0415

    asyncio.run(_show_there(select(there), whose, experiment, trial, (console, rank, engine), lines, follow))


def _file(run: RunDirectory, attempt: int, console: bool, rank: int | None, engine: str | None) -> Path:
    if engine is not None:
        from trainer.errors import UserError  # noqa: PLC0415

        if "/" in engine or engine.startswith("."):
            raise UserError(f"--engine {engine}: give a server's name or number; clusterkit serve list shows them")
        return run.logs / "servers" / (f"server-{engine}.log" if engine.isdigit() else f"{engine}.log")
    if rank is not None:
        return run.logs / f"attempt_{attempt}" / f"rank_{rank}.log"
    return run.console(attempt) if console else run.logs / "main.log"


def _show_here(path: Path, lines: int, follow: bool) -> None:
    from clusterkit.runs.log.tail import read_tail  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415

    try:
        with path.open("rb", buffering=0) as file:
            shown, end = 0, os.fstat(file.fileno()).st_size
            if lines:
                tail, shown = read_tail(file.fileno(), lines)
                _write_tail(tail, path, lines)
                file.seek(shown)
            while follow or shown < end:
                if data := file.read(_BLOCK):
                    _write(data)
                    shown += len(data)
                elif follow:
                    time.sleep(POLL_SECONDS)
                else:
                    return  # it was truncated meanwhile
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


async def _show_there(
    selection: Selection,
    user: str,
    experiment: str | None,
    trial: str | None,
    which: tuple[bool, int | None, str | None],
    lines: int,
    follow: bool,
) -> None:
    import asyncio  # noqa: PLC0415

    from clusterkit.backends.ray.head import Patience, head_of  # noqa: PLC0415
    from clusterkit.backends.ray.storage import newest_attempt, newest_run, read_from, read_last, size_of  # noqa: PLC0415
    from clusterkit.ssh.api import HostError  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415

    path, offset, end, patience = Path(), -1, 0, Patience()
    while True:
        try:
            async with head_of(selection) as head:
                if offset < 0:
                    run = await newest_run(head.session, head.fileroot, user, experiment, trial)
                    if run is None:
                        raise RunError(
                            f"no run {experiment or '*'}/{trial or '*'} of {user} on cluster {head.cluster.name}"
                        )
                    path = _file(run, await newest_attempt(head.session, run), *which)
                    if lines:
                        tail, end = await read_last(head.session, path, lines)
                        _write_tail(tail, path, lines)
                        offset = end
                    else:
                        offset, end = 0, await size_of(head.session, path)
                while follow or offset < end:
                    data = await read_from(head.session, path, offset)
                    _write(data)
                    offset += len(data)
                    patience.reset()
                    if not data and not follow:
                        break  # it was truncated meanwhile
                    if not data:
                        await asyncio.sleep(POLL_SECONDS)
                return
        except HostError as error:
            if not follow or offset < 0:
                raise RunError(str(error)) from error
            output.note(f"cannot see the log for now ({error.message}); trying again")
            await patience.wait()


def _write_tail(tail: Tail, path: Path, lines: int) -> None:
    _write(tail.text())
    if tail.cut:
        from clusterkit.runs.log.tail import MOST_BYTES  # noqa: PLC0415

        output.note(f"the last {lines} lines are longer than {MOST_BYTES >> 20} MB: this is their end. All: {path}")


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
