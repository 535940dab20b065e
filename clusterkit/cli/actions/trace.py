"""`clusterkit trace`: print a recorded trajectory turn by turn."""

from __future__ import annotations

from dataclasses import asdict

from clusterkit.cli.actions.target import Kind, Typed, folder_of_runs, target, told
from clusterkit.runs.choose import choose_runs
from clusterkit.runs.directory import runs
from clusterkit.runs.trace.model import trace_of
from clusterkit.runs.trace.source import find_group
from clusterkit.runs.trace.view import lines_of
from clusterkit.ui import output
from trainer.errors import UserError


def trace(
    run: str | None,
    task: str,
    step: int | None,
    sample: int,
    fileroot: str | None,
    cluster: str | None,
    *,
    full: bool,
    as_json: bool,
) -> None:
    """Print what became of the memory in one trajectory of a run of this machine."""
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
        output.result_json({"run": f"{directory.experiment}/{directory.trial}", **asdict(found)})
        return
    output.result(f"{directory.experiment}/{directory.trial}")
    output.result("\n".join(lines_of(found, full)))
