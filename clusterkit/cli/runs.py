"""`clusterkit runs`: all runs of a place as one table."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()


@app.command(
    examples="""
clusterkit runs --sort accuracy
clusterkit runs --experiment 'tiny-*' --state failed
clusterkit runs seed=1 --last 20 --json
"""
)
@takes_run("experiment", "trial", "fileroot", "cluster", "here", "user")
def runs(
    *,
    run: RunOptions,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT/TRIAL|KEY=VALUE",
            help="Only this run, or runs with these settings, such as train.learning_rate=1e-5.",
        ),
    ] = None,
    slurm: bool = typer.Option(False, "--slurm", help="Only those that were submitted to Slurm."),
    state: str = typer.Option(
        "", "--state", metavar="STATE,...", help="Only those that are running, finished, failed, killed ..."
    ),
    sort: str = typer.Option(
        "time",
        "--sort",
        metavar="KEY",
        help="By time (the newest last), name, state, step, reward, accuracy (or F1, or score), loss (the best "
        "first), or a setting.",
    ),
    reverse: bool = typer.Option(False, "--reverse", help="The other way round."),
    last: int | None = typer.Option(None, "--last", min=1, metavar="N", help="Only the N newest of them."),
    as_json: bool = JSON_OPTION,
) -> None:
    """List all your runs: state, step, reward, held-out score, and the settings in which they differ.

    It goes to the current cluster (clusterkit use), without one to this machine; --here, --cluster NAME and
    --fileroot FOLDER say which. --experiment and --trial may be patterns, such as 'tiny-*'. The runs of others are
    counted, and listed with --user.
    """
    run, chosen = run.with_name_among(settings or [])
    actions.runs.runs(
        run,
        chosen,
        slurm=slurm,
        states=state,
        sort=sort,
        reverse=reverse,
        last=last,
        as_json=as_json,
    )
