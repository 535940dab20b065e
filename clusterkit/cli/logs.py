"""`clusterkit logs`: what a run has logged, here or on a cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from clusterkit.cli import output
from clusterkit.cli.hostoptions import HostOptions, select, takes_hosts

if TYPE_CHECKING:
    from clusterkit.cli.hostoptions import Selection
    from clusterkit.rundir import RunDirectory

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
    fileroot: str = typer.Option("runs", "--fileroot", help="Without --cluster: folder under which runs are."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on showing what is added, until Ctrl-C."),
    lines: int = typer.Option(200, "--lines", "-n", min=0, help="Begin with so many lines of its end; 0: with all."),
    console: bool = typer.Option(False, "--console", help="What the newest attempt printed, instead of main.log."),
    rank: int | None = typer.Option(None, "--rank", min=0, help="What that rank of the newest attempt printed."),
    engine: str | None = typer.Option(
        None, "--engine", help="What that engine server printed: its name or number (clusterkit serve list)."
    ),
) -> None:
    """Print a run's log: main.log, or what an attempt, one of its ranks or an engine server printed.

    With --cluster NAME of a run on that cluster, else on this machine.
    """
    if hosts.cluster is None and hosts.hostnames is None:
        from clusterkit.status import find_run  # noqa: PLC0415

        run = find_run(Path(fileroot).expanduser().absolute(), experiment, trial)
        numbers = run.attempt_numbers()
        _show_here(_file(run, numbers[-1] if numbers else 0, console, rank, engine), lines, follow)
        return
    import asyncio  # noqa: PLC0415

    asyncio.run(_show_there(select(hosts), experiment, trial, (console, rank, engine), lines, follow))


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
    from trainer.errors import RunError  # noqa: PLC0415

    try:
        with path.open("rb") as file:
            _write(_last_lines(file.read(), lines))
            while follow:
                if data := file.read(_BLOCK):
                    _write(data)
                else:
                    time.sleep(POLL_SECONDS)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from error


async def _show_there(
    selection: Selection,
    experiment: str | None,
    trial: str | None,
    which: tuple[bool, int | None, str | None],
    lines: int,
    follow: bool,
) -> None:
    import asyncio  # noqa: PLC0415

    from clusterkit.dispatch.head import Patience, head_of  # noqa: PLC0415
    from clusterkit.dispatch.storage import newest_attempt, newest_run, read_from, read_last  # noqa: PLC0415
    from clusterkit.rundir import user_name  # noqa: PLC0415
    from clusterkit.ssh.api import HostError  # noqa: PLC0415
    from trainer.errors import RunError  # noqa: PLC0415

    path, offset, patience = Path(), -1, Patience()
    while True:
        try:
            async with head_of(selection) as head:
                if offset < 0:
                    run = await newest_run(head.session, head.fileroot, user_name(), experiment, trial)
                    if run is None:
                        raise RunError(
                            f"no run {experiment or '*'}/{trial or '*'} of {user_name()} on cluster {head.cluster.name}"
                        )
                    path = _file(run, await newest_attempt(head.session, run), *which)
                    data, offset = await read_last(head.session, path, lines)
                    _write(data)
                while follow:
                    data = await read_from(head.session, path, offset, _BLOCK)
                    _write(data)
                    offset += len(data)
                    patience.reset()
                    if not data:
                        await asyncio.sleep(POLL_SECONDS)
                return
        except HostError as error:
            if not follow or offset < 0:
                raise RunError(str(error)) from error
            output.note(f"cannot see the log for now ({error.message}); trying again")
            await patience.wait()


def _last_lines(data: bytes, lines: int) -> bytes:
    if not lines:
        return data
    return b"".join(data.splitlines(keepends=True)[-lines:])


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
