"""Choose the runs of a page."""

from __future__ import annotations

from pathlib import Path

from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from trainer.errors import UserError


def choose_runs(fileroot: Path, experiment: str | None, trial: str | None, compare: str | None) -> list[RunDirectory]:
    """Return the run of those names, and the run to compare it with (`TRIAL` or `EXPERIMENT/TRIAL`).

    Raises:
        RunError: there is no such run.
        UserError: both runs are the same, or a name is a pattern or a path.
    """
    for name in (experiment, trial, *(compare.split("/", 1) if compare else [])):
        _check_name(name)
    first = find_run(fileroot, experiment, trial)
    if not compare:
        return [first]
    other_experiment, _, other_trial = compare.rpartition("/")
    second = find_run(fileroot, other_experiment or first.experiment, other_trial)
    if second == first:
        raise UserError(f"{first.experiment}/{first.trial} cannot be compared with itself: name another with --compare")
    return [first, second]


def _check_name(name: str | None) -> None:
    if name is not None and (not name or name in (".", "..") or any(letter in name for letter in "/*?[]\0")):
        raise UserError(f"'{name}' is no name of an experiment or trial: leave out *, ?, [, ] and /")
