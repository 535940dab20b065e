"""`clusterkit trace`: how a memory grew, chunk by chunk."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from trainer.errors import UserError

app = new_app()


@app.command(
    examples="""
clusterkit trace
clusterkit trace memory/run1 --task-id 3 --sample 1
clusterkit trace --heldout --full
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here")
def trace(
    *,
    run: RunOptions,
    task: str | None = typer.Option(
        None,
        "--task-id",
        metavar="K",
        help="Number of a task within its step or among the held-out ones, or a task's id. Default: the first one; of "
        "the held-out ones the first whose answer became better.",
    ),
    heldout: bool = typer.Option(
        False, "--heldout", help="A held-out task, before training beside after training, section by section."
    ),
    step: int | None = typer.Option(None, "--step", help="Training step; the newest recorded one when left out."),
    sample: int | None = typer.Option(None, "--sample", min=0, help="Which trajectory of the task's group; else 0."),
    full: bool = typer.Option(False, "--full", help="Do not cut texts."),
    as_json: bool = JSON_OPTION,
) -> None:
    """Show what every turn of a recorded trajectory did to the memory, and what that was worth.

    For structured memories (agent.name=memalpha): every tool call with its answer, the judge's verdict and how many
    questions it helps to answer. For memagent: the memory as every turn rewrote it, and which of the sentences that
    prove the answer it has. --heldout shows a question that is never trained on, as it was read before the first step
    and after the last one. Without a name it goes to the run that was started last, on this machine or on the current
    cluster; --here and --cluster NAME say which.
    """
    if not heldout:
        actions.trace.trace(run, task or "0", step, sample or 0, full=full, as_json=as_json)
        return
    if step is not None or sample is not None:
        raise UserError("--heldout has one trajectory before training and one after it: leave out --step and --sample")
    actions.trace.trace_heldout(run, task, full=full, as_json=as_json)
