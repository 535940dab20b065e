"""`clusterkit runs`: look at all runs of a place, choose and sort them, and print the table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import Kind, checked_user, place_of_run, slurm_place
from clusterkit.cli.runoptions import RunOptions
from clusterkit.common.suggest import did_you_mean
from clusterkit.config.overrides import known_field, parse_overrides
from clusterkit.runs.overview import RunOverview, differing, flat, overviews
from clusterkit.runs.slurm.queue import was_submitted
from clusterkit.runs.status import UNREADABLE
from clusterkit.ui import output
from clusterkit.ui.runs_table import MOST_SETTINGS, runs_lines, runs_rows
from clusterkit.ui.width import terminal_width
from trainer.errors import UserError

STATES = ("new", "pending", "running", "stalled", "finished", "interrupted", "failed", "killed", UNREADABLE)
_NUMBERS: dict[str, Callable[[RunOverview], float | None]] = {
    "step": lambda one: one.global_step,
    "reward": lambda one: one.reward,
    "accuracy": lambda one: one.accuracy,
    "loss": lambda one: None if one.loss is None else -one.loss,
}
"""What the best run has most of."""
_TEXTS: dict[str, Callable[[RunOverview], str]] = {"name": lambda one: one.name, "state": lambda one: one.state}


def runs(
    run: RunOptions,
    settings: list[str],
    *,
    slurm: bool,
    states: str,
    sort: str,
    reverse: bool,
    last: int | None,
    as_json: bool,
) -> None:
    """Print the runs of a user that fit.

    Args:
        states: with commas; empty for all.
        sort: time, a column or a setting.
    """
    fits = _filter(settings, states)
    order = _order(sort)
    whose = checked_user(run.user)
    if slurm:
        place = slurm_place(run.cluster is not None, run.here, fileroot=run.fileroot)
    else:
        place = place_of_run(run, Kind.CLUSTER_FIRST)
    with open_backend(place, output.note) as backend:
        records = backend.runs()
        records.fetch_overviews(whose)
        newest_first = overviews(records.folder, run.experiment, run.trial, whose)
        wanted = (one for one in newest_first if fits(one) and (not slurm or was_submitted(one.run)))
        listed = list(islice(wanted, last))  # no more runs are looked at
        listed = order(listed[::-1])
        if reverse:
            listed.reverse()
        keys = differing(listed)
        _tell_of_others(records.folder, whose, run.user is None)
        for one in listed:
            output.notes(records.with_original_paths(f"{one.name}: {problem}") for problem in one.problems)
        if as_json:
            output.result_json(records.with_original_paths([one.as_dict(keys) for one in listed]))
            return
        if not listed:
            folder = records.with_original_paths(str(records.folder))
            whence = f"of {whose} under {folder} {backend.where}".rstrip()
            chosen = bool(settings or states or slurm or run.experiment or run.trial)
            cluster = f" --cluster {place.hosts.cluster}" if place.hosts and place.hosts.cluster else ""
            start = f"clusterkit train{cluster} --preset tiny starts one, --fileroot FOLDER names another folder"
            output.result(f"no such runs {whence}; all: clusterkit runs" if chosen else f"no runs {whence}: {start}")
            return
        print_table(listed, keys)
        troubled = [one for one in listed if one.state in ("failed", "killed", "stalled")]
        if troubled:
            named = backend.words(records.original(troubled[-1].run))
            output.note(f"why {troubled[-1].name} is {troubled[-1].state}: clusterkit diagnose {named}")


def print_table(listed: Sequence[RunOverview], keys: Sequence[str]) -> None:
    """Print runs as a table, in a pipe with tabs for columns. keys: settings to show."""
    if terminal_width() is None:
        output.exact("\n".join(runs_rows(listed, keys)))
        return
    output.result("\n".join(runs_lines(listed, keys, terminal_width())))
    if (more := len(keys) - MOST_SETTINGS) > 0:
        output.note(f"{more} more settings differ: --json has all")


def _tell_of_others(folder: Path, whose: str, ours: bool) -> None:
    others: Counter[str] = Counter()
    with suppress(OSError):
        for user in (path.name for path in (folder / "logs").iterdir() if path.name != whose):
            others[user] = sum(1 for _ in (folder / "logs" / user).glob("*/*/"))
    found = ", ".join(f"{name} ({count})" for name, count in sorted(others.items()) if count)
    if found and ours:
        output.note(f"of others: {found}; --user NAME")


def _filter(settings: list[str], states: str) -> Callable[[RunOverview], bool]:
    """Return whether a run is one of those that were asked for. Raises UserError where a setting or state is none."""
    wanted = flat(parse_overrides(settings))
    named = {name.strip() for name in states.split(",") if name.strip()}
    for name in sorted(named - set(STATES)):
        raise UserError(f"--state {name}: choose from {', '.join(STATES)}{did_you_mean(name, STATES)}")
    return lambda one: (
        (not named or one.state in named)
        and all(key in one.settings and _equal(one.settings[key], value) for key, value in wanted.items())
    )


def _equal(left: Any, right: Any) -> bool:
    """Whether two values of a setting are the same: YAML has 1e-05 as text or as a number."""
    if left == right:
        return True
    try:
        return float(left) == float(right)
    except (TypeError, ValueError):
        return False


def _order(sort: str) -> Callable[[list[RunOverview]], list[RunOverview]]:
    """Return what sorts runs that are in the order of time. Raises UserError: there is no such column or setting."""
    if sort == "time":
        return list
    if sort in _TEXTS:
        return lambda listed: sorted(listed, key=_TEXTS[sort])
    sort = "accuracy" if sort.lower() in ("f1", "score") else sort  # as the column may be called
    if sort in _NUMBERS:
        of = _NUMBERS[sort]
        return lambda listed: sorted(listed, key=lambda one: -_comparable(of(one)))
    try:
        known_field(sort)
    except UserError as error:
        columns = ", ".join(["time", *_TEXTS, *_NUMBERS]).replace("accuracy", "accuracy (or F1, or score)")
        raise UserError(f"--sort {sort}: choose {columns}, or a setting ({error})") from None
    return lambda listed: sorted(listed, key=lambda one: _setting_key(one.settings.get(sort)))


def _comparable(value: float | None) -> float:
    """A number that sorts; those that are unknown or NaN come last."""
    return -math.inf if value is None or math.isnan(value) else value


def _setting_key(value: Any) -> tuple[int, float, str]:
    """Numbers before texts, unknown values last."""
    if value is None:
        return 2, 0.0, ""
    try:
        return 0, float(value), ""
    except (TypeError, ValueError):
        return 1, 0.0, str(value)
