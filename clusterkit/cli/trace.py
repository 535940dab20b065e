"""`clusterkit trace`: how a memory grew, chunk by chunk."""

from __future__ import annotations

import typer

from clusterkit.cli.target import FILEROOT_OPTION, Kind, Typed, folder_of_runs, target, told
from clusterkit.runs.directory import runs
from clusterkit.ui import output

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
    from clusterkit.runs.choose import choose_runs  # noqa: PLC0415
    from clusterkit.runs.trace.model import trace_of  # noqa: PLC0415
    from clusterkit.runs.trace.source import find_group  # noqa: PLC0415
    from clusterkit.runs.trace.view import lines_of  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    experiment, _, trial = (run or "").rpartition("/")
    if cluster is None and not runs(folder_of_runs(fileroot), experiment or None, trial or None):
        cluster = told(target(Kind.CLUSTER_FIRST, Typed(fileroot=fileroot)))
    if cluster is not None:
        raise UserError(
            "trace reads trajectories, which are not copied from clusters: run it on a host that sees the storage, "
            f"with --fileroot {fileroot or '/storage/ray/experiments'}"
        )
    (directory,) = choose_runs(folder_of_runs(fileroot), experiment or None, trial or None, None)
    number, group = find_group(directory, step, task)
    if sample >= len(group):
        raise UserError(f"the task has {len(group)} trajectories: choose --sample 0 to {len(group) - 1}")
    found = trace_of(number, group, sample)
    if as_json:
        output.result_json({"run": f"{directory.experiment}/{directory.trial}", **found.as_dict()})
        return
    output.result(f"{directory.experiment}/{directory.trial}")
    output.result("\n".join(lines_of(found, full)))
