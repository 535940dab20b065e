"""`clusterkit recover`: what a run would go on from."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import FILEROOT_OPTION, HERE_OPTION

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _recover() -> None:
    """Look at what runs would go on from."""


@app.command()
def check(
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that the run would be started with, as for train."),
    ] = None,
    preset: str | None = typer.Option(
        None, "--preset", help="Preset of the command that it would be started with; as last time when left out."
    ),
    task: str | None = typer.Option(None, "--task", help="Task of that command."),
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="A run of that cluster; its files are read there."
    ),
    here: bool = HERE_OPTION,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what a run would go on from, whether that is whole, and whether it fits; changes nothing.

    Every byte is compared with what was written, as the trainer does at its start. Exit codes: 0 a start would go on
    from a checkpoint, 1 it would not (none is there or whole, or settings differ), 2 bad usage. With --preset it goes
    where train would go, else to the run that was started last; --here and --cluster NAME say which.
    """
    actions.recover.check(overrides or [], preset, task, experiment, trial, fileroot, cluster, here, as_json=as_json)
