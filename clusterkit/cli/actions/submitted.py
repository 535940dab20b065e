"""What `clusterkit train` does with a run that it has submitted to a cluster or to Slurm: follow it, or say how."""

from __future__ import annotations

from collections.abc import Callable

import typer

from clusterkit.backends.local.train import RunOutcome
from clusterkit.backends.ray.submit import SubmittedRun
from clusterkit.runs.final_evaluation import summary_lines
from clusterkit.ui import output
from clusterkit.ui.progress import Progress, showing


def show(
    submitted: SubmittedRun,
    where: str,
    follow: Callable[[Progress], RunOutcome],
    *,
    detach: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Follow the run to its end, or leave it and say what to type. Exit codes as for a run of this machine.

    Args:
        submitted: the run.
        where: options that name its place, such as `--cluster lab`.
        follow: shows how it goes until it ends; Ctrl-C leaves the run alone.
        detach: come back at once.
        as_json: print the result as JSON.
        shown: whether progress is shown.

    """
    run = submitted.run
    named = f"{where} --experiment {run.experiment} --trial {run.trial}"
    how_to_go_on = (
        f"  look at it  clusterkit status {named}\n"
        f"  its log     clusterkit logs -f {named}\n"
        f"  stop it     clusterkit stop {named}"
    )
    if detach or submitted.state == "complete":
        if as_json:
            output.result_json(submitted.as_dict())
        output.note(how_to_go_on)
        return
    with showing(f"{run.experiment}/{run.trial}", shown) as progress:
        try:
            outcome = follow(progress)
        except KeyboardInterrupt:
            output.note(f"detached: {submitted.sentence}\n{how_to_go_on}")
            raise typer.Exit(0) from None
    if as_json:
        output.result_json({**submitted.as_dict(), **outcome.as_dict(run)})
    if outcome.status == "interrupted":
        output.note(outcome.message)
    elif outcome.message:
        output.error(outcome.message)
    if outcome.exit_code == 0 and outcome.summary is not None and not as_json:
        output.result("\n".join(summary_lines(outcome.summary)))
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
