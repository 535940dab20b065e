"""Choose the runs of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from trainer.errors import UserError


def choose_runs(
    fileroot: Path, experiment: str | None, trial: str | None, compare: Sequence[str] = ()
) -> list[RunDirectory]:
    """Return the run of those names, and the runs to compare it with.

    Args:
        experiment: None: any.
        trial: None: the newest.
        compare: `TRIAL` or `EXPERIMENT/TRIAL` of the others.

    Raises:
        RunError: there is no such run.
        UserError: two runs are the same, or a name is a pattern or a path.
    """
    for name in (experiment, trial, *(part for one in compare for part in one.split("/", 1))):
        _check_name(name)
    chosen = [find_run(fileroot, experiment, trial)]
    for one in compare:
        other_experiment, _, other_trial = one.rpartition("/")
        run = find_run(fileroot, other_experiment or chosen[0].experiment, other_trial)
        if run in chosen:
            raise UserError(f"{run.name} cannot be compared with itself: name others with --compare")
        chosen.append(run)
    return chosen


def _check_name(name: str | None) -> None:
    if name is not None and (not name or name in (".", "..") or any(letter in name for letter in "/*?[]\0")):
        raise UserError(f"'{name}' is no name of an experiment or trial: leave out *, ?, [, ] and /")
