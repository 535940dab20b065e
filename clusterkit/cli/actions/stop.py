"""`clusterkit stop` of a training on this machine."""

from __future__ import annotations

from clusterkit.backends.stop import stop_run
from clusterkit.cli.actions.target import folder_of_runs
from clusterkit.ui import output


def stop(
    experiment: str | None, trial: str | None, fileroot: str | None, user: str, *, deadline: float, force: bool
) -> None:
    """End the run that is meant, and say how it ended."""
    root = folder_of_runs(fileroot)
    output.result(stop_run(root, experiment, trial, deadline=deadline, force=force, say=output.note, user=user))
