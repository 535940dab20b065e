"""`clusterkit train --sweep`: check all combinations, train or submit what is not complete, print the table."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import typer

from clusterkit.backends.base import Backend, PlannedRun, RunRequest
from clusterkit.backends.records import Runs, errors_with_original_paths
from clusterkit.backends.table import open_backend
from clusterkit.capacity.plan import RunPlan
from clusterkit.capacity.runnable import refusal
from clusterkit.cli.actions.report import write_comparison
from clusterkit.cli.actions.runs import print_table
from clusterkit.cli.actions.sweep_trials import SweptRun, submit_all, train_in_turn
from clusterkit.cli.actions.train import look_at_storage, place_for, storage_line
from clusterkit.cli.actions.train_from import settings_from
from clusterkit.cli.trainoptions import TrainOptions
from clusterkit.config.aliases import translation_notes
from clusterkit.config.resolve import Resolved, resolve
from clusterkit.config.sweep import Combination, combinations
from clusterkit.provision.assets.model import NodeAsset
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.runs.overview import RunOverview, differing, flat, overview
from clusterkit.runs.train_command import again_command
from clusterkit.runs.trials import TrialState, choose_trial, require_free
from clusterkit.ui import output
from trainer.errors import RunError, UserError

SOME_FAILED = 3
"""Exit code where only some of the trials are complete."""
INTERRUPTED = 130

T = TypeVar("T")
S = TypeVar("S")
Look = Callable[[PlannedRun], tuple[list[str], UserError | None]]
"""As `look_at_storage`."""


@dataclass(frozen=True)
class _Typed:
    """One trial as typed: its combination of values, its KEY=VALUE words, and what they resolve to."""

    combination: Combination
    settings: list[str]
    resolved: Resolved


def sweep(sweeps: list[str], typed: TrainOptions) -> None:
    """Train a trial for every combination. The exit code is 3 where only some are complete, 1 where none is."""
    settings = typed.settings
    chosen = combinations(sweeps, settings)
    output.notes(dict.fromkeys(note for one in chosen for note in translation_notes([*typed.overrides, *one.words])))

    def resolved(one: Combination) -> _Typed:
        words = [*(word for word in settings if not word.startswith("trial_name=")), *one.words]
        words.append(f"trial_name={one.trial}")
        return _Typed(one, words, resolve(typed.preset, typed.task, words))

    wanted = _all_of(chosen, resolved, lambda one: " ".join(one.words))
    place = place_for([one.resolved for one in wanted], typed)
    with open_backend(place, output.note) as backend:
        records = backend.runs(backend.request(typed.preset, typed.task, wanted[0].settings).config.fileroot)
        records.fetch_overviews()
        look = _once_for_all(look_at_storage)

        def checked(one: _Typed) -> tuple[SweptRun, RunPlan]:
            words = list(one.settings)
            if typed.recover_from is not None:
                words += settings_from(typed.recover_from, backend, typed.preset, typed.task, words)
            return _checked(backend, records, backend.request(typed.preset, typed.task, words), look)

        found = _all_of(wanted, checked, lambda one: one.combination.trial)
        runs = [run for run, _ in found]
        _require_different(runs)
        if typed.dry_run:
            _print_plans(records, wanted, found, backend.where, typed.as_json)
            return
        again = again_command(sys.argv[1:])
        here = place.mode == "local"
        if here:
            left = train_in_turn(backend, runs, again, shown=typed.shown)
        else:
            left = submit_all(backend, runs, again, detach=typed.detach)
        records.fetch_overviews()
        listed = _overviews(records, runs)
        code = (INTERRUPTED if here else 0) if left else _exit_code(listed)
        _print_result(records, listed, code, typed.as_json)
        if left:
            output.note(left)
        _print_next(backend, records, listed)
    if code:
        raise typer.Exit(code)


def _checked(backend: Backend, records: Runs, request: RunRequest, look: Look) -> tuple[SweptRun, RunPlan]:
    """Whether a trial can be started, and its plan."""
    config = request.config.model_copy(update={"fileroot": str(records.folder)})
    with errors_with_original_paths(records):
        trial = choose_trial(config, named_by_user=True)
    plan, complete = RunPlan(request.config, trial), trial.state is TrialState.COMPLETE
    stored = list[str]()
    if backend.attach(request) is None:
        planned = backend.plan(request)
        if planned.trial is not None:
            require_free(planned.trial.run, "To train the others: leave its value out, or wait until it has ended")
        if refused := refusal(planned.request.typed or planned.request.config, planned.trial):
            raise refused
        if not complete:
            stored, missing = look(planned)
            if missing:
                raise missing
    return SweptRun(request, plan.summary, complete, tuple(stored)), plan


def _once_for_all(look: Look) -> Look:
    """A look at the storage that is taken once for all trials with the same models and data."""
    known: dict[tuple[NodeAsset, ...], tuple[list[str], UserError | None]] = {}

    def looked(planned: PlannedRun) -> tuple[list[str], UserError | None]:
        assets = planned.request.assets
        if assets not in known:
            known[assets] = look(planned)
        return known[assets]

    return looked


def _all_of(items: Sequence[T], work: Callable[[T], S], name: Callable[[T], str]) -> list[S]:
    """Do something for every trial; what is wrong with any of them is told together."""
    done: list[S] = []
    problems: dict[str, list[str]] = {}
    for item in items:
        try:
            done.append(work(item))
        except RunError:
            raise
        except UserError as error:
            problems.setdefault(str(error), []).append(name(item))
    if problems:
        told = [
            message if len(names) == len(items) else f"{', '.join(names)}: {message}"
            for message, names in problems.items()
        ]
        raise UserError("\n".join([*told, "No trial was started"]))
    return done


def _require_different(runs: Sequence[SweptRun]) -> None:
    known: dict[str, str] = {}
    for run in runs:
        values = json.dumps(run.request.config.model_dump(mode="json", exclude={"trial_name"}), sort_keys=True)
        if (other := known.setdefault(values, run.name)) != run.name:
            raise UserError(f"{other} and {run.name} would be the same run: leave one of the values out")


def _print_plans(
    records: Runs, wanted: Sequence[_Typed], found: Sequence[tuple[SweptRun, RunPlan]], where: str, as_json: bool
) -> None:
    """Print what would be trained: of each trial what is its own, and once what all have."""
    if as_json:
        plans = [
            {"trial": run.request.config.trial_name, "settings": list(one.combination.words), "plan": plan.as_dict()}
            | ({"storage": list(run.stored)} if run.stored else {})
            for one, (run, plan) in zip(wanted, found, strict=True)
        ]
        output.result_json(records.with_original_paths({"trials": plans}))
        return
    lines = [
        [line for line in plan.remote_lines(where)[1:] if not line.startswith("checkpoint")]
        + [storage_line(text) for text in run.stored]
        for run, plan in found
    ]
    shared = [line for line in lines[0] if all(line in other for other in lines)]
    how = f"one job each {where}" if where else "one after another on this machine"
    output.lines([f"{len(found)} trials, {how} (nothing has been written or started)"])
    for (run, _), own in zip(found, lines, strict=True):
        output.lines([f"  {run.plan}", *(f"      {line}" for line in own if line not in shared)])
    output.lines(["each", *(f"  {line}" for line in shared)])


def _overviews(records: Runs, runs: Sequence[SweptRun]) -> list[RunOverview]:
    """The trials as they are now, those that have not begun among them, with the settings that they are to have."""
    found = []
    for one in runs:
        config = one.request.config
        run = RunDirectory(records.folder, user_name(), config.experiment_name, config.trial_name)
        seen = overview(run, time.time())
        found.append(replace(seen, settings=seen.settings or flat(config.model_dump(mode="json"))))
    return found


def _exit_code(listed: Sequence[RunOverview]) -> int:
    finished = sum(one.state == "finished" for one in listed)
    return 0 if finished == len(listed) else SOME_FAILED if finished else 1


def _print_result(records: Runs, listed: Sequence[RunOverview], code: int, as_json: bool) -> None:
    keys = differing(listed)
    if as_json:
        trials = records.with_original_paths([one.as_dict(keys) for one in listed])
        output.result_json({"trials": trials, "exit_code": code})
    else:
        print_table(listed, keys)


def _write_page(records: Runs, listed: Sequence[RunOverview]) -> Path | None:
    """Write the page of trials of which none is at work. Whatever fails here is a warning: they are done."""
    if any(one.alive for one in listed):
        return None
    try:
        return write_comparison(records, [one.run for one in listed])
    except Exception as error:
        output.note(f"warning: no page was written ({' '.join(str(error).split())})")
        return None


def _print_next(backend: Backend, records: Runs, listed: Sequence[RunOverview]) -> None:
    """Print what to type next, for the trial that reads best and for one that is at work or has failed.

    Trials with different rewards have scores of different kinds: none of them is the best.
    """
    alike = "reward.name" not in differing(listed)
    finished = [one for one in listed if one.state == "finished"]
    best = max(finished or listed, key=_goodness) if alike else (finished or listed)[0]
    measure = "loss" if best.accuracy is None and best.loss is not None else "accuracy" if alike else "name"
    named = backend.words(records.original(best.run))
    all_named = f"--experiment {best.run.experiment}{named.removeprefix(best.run.word)}"
    if not alike:
        output.note("note: reward.name differs, so rewards and scores of these trials do not compare: none is the best")
    lines = ["", "Next:", f"  this table again  clusterkit runs {all_named} --sort {measure}"]
    compared = [best, *(one for one in listed if one.global_step and one is not best)]
    if len(compared) > 1 and best.global_step:
        others = [word for one in compared[1:] for word in ("--compare", one.name)]
        others += ["--out", f"{best.run.experiment}.html"]
        page = _write_page(records, compared)
        lines.append(f"  compare them      {page or f'clusterkit report {named} {shlex.join(others)}'}")
    if alive := next((one for one in listed if one.alive), None):
        lines.append(f"  follow one        clusterkit status --watch {backend.words(records.original(alive.run))}")
    elif finished:
        lines.append(f"  {'the best one ' if alike else 'the first one'}     clusterkit status {named}")
    else:
        lines.append(f"  why they ended    clusterkit diagnose {named}")
    output.advice(lines)


def _goodness(one: RunOverview) -> tuple[float, float, float]:
    return _or_least(one.accuracy), _or_least(one.reward), -(one.loss or 0.0)


def _or_least(value: float | None) -> float:
    return -math.inf if value is None else value
