"""`clusterkit trace`: how a memory grew, chunk by chunk."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import FILEROOT_OPTION

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def trace(
    run: str | None = typer.Argument(
        None, metavar="TRIAL or EXPERIMENT/TRIAL", help="The run; the newest one when left out."
    ),
    task: str = typer.Option("0", "--task", metavar="K", help="Number of a task within its step, or a task's id."),
    step: int | None = typer.Option(None, "--step", help="Training step; the newest recorded one when left out."),
    sample: int = typer.Option(0, "--sample", min=0, help="Which trajectory of the task's group."),
    full: bool = typer.Option(False, "--full", help="Do not cut texts."),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="A run of that cluster; --fileroot is then a folder there."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Show what every turn of a recorded trajectory did to the memory, and what that was worth.

    For structured memories (agent.name=memalpha): every tool call with its answer, the judge's verdict and how many
    questions it helps to answer. For memagent: the memory as every turn rewrote it. Reads runs of this machine only.
    """
    actions.trace.trace(run, task, step, sample, fileroot, cluster, full=full, as_json=as_json)
