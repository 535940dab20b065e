"""`clusterkit recover`: what a run would go on from."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app(no_args_is_help=True)


@app.callback(
    examples="""
clusterkit recover check
clusterkit recover check --preset tiny seed=2
"""
)
def _recover() -> None:
    """Look at what runs would go on from."""


@app.command(
    examples="""
clusterkit recover check
clusterkit recover check tiny-recall/run2
clusterkit recover check --preset tiny seed=2
"""
)
@takes_run("experiment", "trial", "fileroot", "cluster", "here")
def check(
    *,
    run: RunOptions,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT/TRIAL|KEY=VALUE",
            help="The run, and settings that it would be started with, as for train.",
        ),
    ] = None,
    preset: str | None = typer.Option(
        None,
        "--preset",
        metavar="NAME",
        help="Preset of the command that it would be started with; as last time when left out.",
    ),
    task: str | None = typer.Option(None, "--task", metavar="NAME", help="Task of that command."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what a run would go on from, whether that is whole, and whether it fits; changes nothing.

    Every byte is compared with what was written, as the trainer does at its start. Exit codes: 0 a start would go on
    from a checkpoint, 1 it would not (none is there or whole, or settings differ), 2 bad usage. With --preset it goes
    where train would go, else to the run that was started last; --here and --cluster NAME say which.
    """
    run, settings = run.with_name_among(overrides or [])
    actions.recover.check_run(settings, preset, task, run, as_json=as_json)
