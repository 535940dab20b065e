"""`clusterkit train`: start the run where it belongs, or attach to it, and follow it to its end."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
import yaml

from clusterkit.backends.base import Backend, Place, PlannedRun, RunOutcome, SubmittedRun
from clusterkit.backends.slurm.script import SlurmOptions
from clusterkit.backends.table import open_backend
from clusterkit.capacity.plan import RunPlan, remote_plan
from clusterkit.capacity.runnable import refusal
from clusterkit.cli.actions.report import write_at_end
from clusterkit.cli.actions.target import announce, place_of, slurm_place
from clusterkit.cli.actions.target_of_run import for_training
from clusterkit.cli.actions.train_from import settings_from
from clusterkit.cli.trainoptions import TrainOptions
from clusterkit.config.aliases import translation_notes
from clusterkit.config.presets import size_names
from clusterkit.config.resolve import Resolved, resolve, shown_values
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.final_evaluation import summary_lines
from clusterkit.runs.log.tail import last_lines
from clusterkit.runs.trace.heldout import AFTER, heldout_file
from clusterkit.runs.train_command import again_command, further_command
from clusterkit.ui import output
from clusterkit.ui.progress import showing
from trainer.errors import UserError


def train(typed: TrainOptions) -> None:
    """Train where the options and settings say. The exit code is the run's; 0 for a run that was detached from."""
    output.notes(translation_notes(typed.overrides))
    settings = typed.settings
    place = place_for([resolve(typed.preset, typed.task, settings)], typed)
    with open_backend(place, output.note) as backend:
        if typed.recover_from is not None:
            settings += settings_from(typed.recover_from, backend, typed.preset, typed.task, settings)
        request = backend.request(typed.preset, typed.task, settings)
        submitted = None if typed.dry_run else backend.attach(request)
        sentence, warnings = "", list[str]()
        if submitted is None:
            planned = backend.plan(request)
            plan = RunPlan(planned.request.config, planned.trial) if planned.trial else remote_plan(request.config)
            refused = refusal(planned.request.typed or planned.request.config, planned.trial)
            if typed.dry_run:
                stored, missing = look_at_storage(planned)
                _print_plan(planned, plan, stored, backend.where, typed.as_json)
                refused = refused or missing
            if refused:
                raise refused
            if typed.dry_run:
                return
            sentence = plan.summary if planned.trial else ""  # before our own lock makes the run look busy
            warnings = plan.warnings
            submitted = backend.start(planned)
        if submitted.state != "started" or not sentence:
            sentence = f"{submitted.sentence} {backend.where}".rstrip()
        output.note(f"{sentence}. Folder: {submitted.run.logs}")
        if submitted.submission_id and not typed.detach:
            output.note("it goes on without this command; Ctrl-C only stops following it")
        for warning in warnings:
            output.note(f"warning: {warning}")
        _follow(backend, submitted, detach=typed.detach, as_json=typed.as_json, shown=typed.shown)


def refuse_config(file: str) -> None:
    """Say what AReaL's `ppo-math --config FILE` is here. Always raises UserError."""
    size, gpus = re.search(r"(\d+(?:\.\d+)?B)", file), re.search(r"gpus-(\d+)", file)
    kind = "-zero" if "zero" in file else ""
    alike = [name for name in size_names() if size and re.fullmatch(rf"{re.escape(size[1])}{kind}_n\d+", name)]
    wanted = f"_n{max(int(gpus[1]) // 8, 1)}" if gpus else ""
    preset = next((name for name in alike if wanted and name.endswith(wanted)), next(iter(alike), "tiny"))
    raise UserError(
        f"--config {file}: settings come from a preset here, and ppo-math is a task of it. Such as: clusterkit train "
        f"--preset {preset}{' --task math' if alike else ''} KEY=VALUE …\nAll presets: clusterkit presets. AReaL's own "
        "KEY=VALUE words are understood (docs/coming-from-areal.md)"
    )


def place_for(runs: Sequence[Resolved], typed: TrainOptions) -> Place:
    """Where runs that are started together go, told on stderr."""
    if typed.slurm or any("mode=slurm" in run.overrides for run in runs):
        place = slurm_place(typed.run.cluster is not None, typed.run.here, SlurmOptions(**typed.slurm_options))
    else:
        if any(typed.slurm_options.values()):
            raise UserError("options for Slurm: add --slurm to submit the run, or leave them out")
        found = [for_training(run, typed.run) for run in runs]
        if len({one.cluster for one in found}) > 1:
            raise UserError(
                "some of these runs would go to this machine and some to the cluster: add --here or --cluster NAME"
            )
        place = place_of(announce(found[0]))
    if typed.detach and place.mode == "local":
        raise UserError(
            "--detach is for runs of a cluster or Slurm: a run of this machine ends with its command. Leave it out (in "
            "tmux or screen the command outlives the login), or say where with --cluster NAME or --slurm"
        )
    return place


def look_at_storage(planned: PlannedRun) -> tuple[list[str], UserError | None]:
    """What the place's storage has of the run's models and data, and what the run would be refused for.

    A place that cannot be asked is no error: the plan holds without it.
    """
    try:
        found = planned.look()
    except UserError as error:
        return [f"was not asked for models and data: {str(error).splitlines()[0]}"], None
    problem = next((one.problem for one in found if one.problem), "")
    return [one.text for one in found], UserError(problem) if problem else None


def storage_line(text: str) -> str:
    """A sentence of `look_at_storage` as a line of a plan."""
    return f"{'storage':<11} {text}"


def _print_plan(planned: PlannedRun, plan: RunPlan, stored: list[str], where: str, as_json: bool) -> None:
    config = shown_values(planned.request.config)
    if as_json:
        counts = {"steps": plan.steps, "ranks": plan.config.ranks, "gpus": plan.config.gpus}
        facts = plan.as_dict() if planned.trial else counts
        told = {"storage": stored} if stored else {}
        output.result_json({"config": config, **dict(planned.facts), **told, "plan": facts})
        return
    output.exact(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    lines = plan.lines() if planned.trial else plan.remote_lines(where)
    lines += map(storage_line, stored)
    title = (
        f"The plan, {where} (nothing has been written or started)" if where else "The plan (nothing has been written)"
    )
    script = ["", "What sbatch would be given", "", *planned.script.splitlines()] if planned.script else []
    # As comments: the whole output is the YAML that would be written.
    output.exact("\n".join(["#", *(f"# {line}".rstrip() for line in (title, *lines, *script))]))


def _follow(backend: Backend, submitted: SubmittedRun, *, detach: bool, as_json: bool, shown: bool) -> None:
    """Follow the run to its end and print its outcome, or leave it and say what to type."""
    run, named = submitted.run, backend.words(submitted.run)
    how_to_go_on = (
        f"  look at it  clusterkit status {named}\n"
        f"  its log     clusterkit logs -f {named}\n"
        f"  stop it     clusterkit stop {named}\n"
        f"  all runs    clusterkit runs{named.removeprefix(run.word)}"
    )
    if detach and submitted.submission_id:
        if as_json:
            output.result_json(submitted.as_dict())
        output.note(how_to_go_on)
        return
    with showing(run.name, shown) as progress:
        try:
            outcome = backend.follow(submitted, progress, again_command(sys.argv[1:]))
        except KeyboardInterrupt:
            if not submitted.submission_id:
                raise
            output.note(f"detached: {submitted.sentence}\n{how_to_go_on}")
            raise typer.Exit(0) from None
    if as_json:
        output.result_json({**submitted.as_dict(), **outcome.as_dict(run)})
    if outcome.exit_code == 0:
        _print_closing(backend, run, outcome, as_json)
        return
    if outcome.status == "interrupted":
        output.note(outcome.message)
    else:
        output.error(outcome.message)
        _print_console(run)
    raise typer.Exit(outcome.exit_code)


def _print_closing(backend: Backend, run: RunDirectory, outcome: RunOutcome, as_json: bool) -> None:
    named = backend.words(run)
    if outcome.summary is None:
        output.note(f"warning: there is no readable closing table at {run.summary}; the numbers are in {run.metrics}")
    elif not as_json:
        output.lines(summary_lines(outcome.summary))
    page = _write_report(backend, run, named)
    if page is not None:
        (output.note if as_json else output.exact)(f"picture     {page}")
    lines = [
        "",
        "Next:",
        f"  look at it      clusterkit status {named}",
        *([f"  as a web page   clusterkit report {named}"] if page is None else []),
        f"  train further   {further_command(sys.argv[1:], run.trial, 2 * outcome.global_step or 1)}",
        "  train anew      the same command with seed=2 trial_name=NEW",
    ]
    if heldout_file(run, AFTER).is_file():
        lines.append(f"  see it read     clusterkit trace --heldout {named}")
    if run.tensorboard.is_dir():
        lines.append(f"  see the curves  tensorboard --logdir {run.tensorboard}")
    output.advice(lines)


def _write_report(backend: Backend, run: RunDirectory, named: str) -> Path | None:
    """Write the page of a run that has ended well. Whatever fails here is a warning: the run is done."""
    try:
        return write_at_end(backend, run)
    except Exception as error:
        reason = " ".join(str(error).split())
        output.note(f"warning: no page was written ({reason}); clusterkit report {named} --out FILE writes one")
        return None


def _print_console(run: RunDirectory) -> None:
    """With --debug: the end of what the trainer printed and of its log, tracebacks included, where they are here."""
    if not output.debug or not run.logs.is_dir():
        return
    for path in (run.console((run.attempt_numbers() or [0])[-1]), run.logs / "main.log"):
        output.note("\n".join([f"--- {path}", *last_lines(path, 60)]))
