"""`clusterkit train`: train here, or send the run to its place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import typer
import yaml

from clusterkit.backends.local.launch import require_writable, trainer_command
from clusterkit.backends.local.train import Restarts, RunOutcome, again_command, follow, further_command, prepared
from clusterkit.backends.slurm.script import Wishes
from clusterkit.capacity.plan import RunPlan
from clusterkit.capacity.runnable import refusal
from clusterkit.cli.actions.target import Typed, told
from clusterkit.cli.actions.target_of_run import for_training
from clusterkit.config.aliases import translation_notes
from clusterkit.config.resolve import Resolved, resolve, shown_values
from clusterkit.runs.diagnose.applied import with_applied
from clusterkit.runs.final_evaluation import read_summary, summary_lines
from clusterkit.runs.log.metrics import read_history
from clusterkit.runs.log.tail import last_lines
from clusterkit.runs.trials import Trial, TrialState, choose_trial
from clusterkit.ui import output
from clusterkit.ui.progress import showing
from trainer.errors import UserError


def train(
    overrides: list[str],
    preset: str | None,
    task: str | None,
    fileroot: str | None,
    cluster: str | None,
    *,
    here: bool,
    slurm: bool,
    wishes: tuple[str, str, str, tuple[str, ...], bool],
    image: str,
    mounts: Sequence[str],
    recover_from: str | None,
    dry_run: bool,
    detach: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Train where the options and settings say. wishes, image, mounts: for Slurm."""
    output.notes(translation_notes(overrides))
    slurm = slurm or "mode=slurm" in overrides
    if slurm and (cluster is not None or here):
        raise UserError(f"{'--here' if here else '--cluster NAME'} and --slurm (mode=slurm) are two places: choose one")
    typed = [*overrides, *([f"fileroot={fileroot}"] if fileroot is not None else [])]
    if not slurm:
        if any((*wishes, image, mounts)):
            raise UserError("options for Slurm: add --slurm to submit the run, or leave them out")
        cluster = told(for_training(resolve(preset, task, typed), Typed(cluster, here, fileroot)))
    if recover_from is not None:
        from clusterkit.cli.actions.train_from import settings_from  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

        typed += settings_from(recover_from, preset, task, typed, cluster)
    if cluster is not None:
        from clusterkit.cli.actions.train_cluster import train_on  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

        train_on(cluster, preset, task, typed, dry_run=dry_run, detach=detach, as_json=as_json, shown=shown)
        return
    if slurm:
        from clusterkit.cli.actions.train_slurm import train_on_slurm  # noqa: PLC0415 (slow, only for Slurm)

        train_on_slurm(
            preset,
            task,
            typed,
            Wishes(*wishes),
            image=image,
            mounts=mounts,
            dry_run=dry_run,
            detach=detach,
            as_json=as_json,
            shown=shown,
        )
        return
    resolved = resolve(preset, task, typed)
    trial = choose_trial(resolved.config, resolved.trial_is_named)
    require_writable(trial.run)
    resolved = _with_applied(resolved, trial)
    refused = refusal(resolved.config, trial)
    if dry_run:
        _print_plan(resolved, trial, as_json)
    if refused:
        raise refused
    if dry_run:
        return
    if trial.state is TrialState.COMPLETE:
        _print_complete(trial, as_json)
        return
    _train(resolved, trial, as_json, show_progress=shown)


def _with_applied(resolved: Resolved, trial: Trial) -> Resolved:
    """The configuration with what `clusterkit diagnose --apply` left beside the run."""
    if trial.state is TrialState.COMPLETE:
        return resolved
    config, notes = with_applied(resolved.config, trial.run)
    for note in notes:
        output.note(f"note: {note}")
    return replace(resolved, config=config)


def _train(resolved: Resolved, trial: Trial, as_json: bool, show_progress: bool) -> None:
    run = trial.run
    config = resolved.config.model_copy(update={"trial_name": run.trial})
    plan = RunPlan(config, trial)
    beginning = plan.summary  # before our own lock makes the run look busy
    with prepared(run, config, trial) as attempt:
        output.note(f"{beginning}. Folder: {run.logs}")
        for warning in plan.warnings:
            output.note(f"warning: {warning}")
        again = again_command(sys.argv[1:])
        with showing(f"{run.experiment}/{run.trial}", show_progress) as progress:
            outcome = follow(run, trainer_command(run), attempt, progress, again, Restarts.of(config))
    if as_json:
        output.result_json(outcome.as_dict(run))
    if outcome.exit_code == 0:
        _print_closing(trial, outcome.summary, as_json)
        return
    if outcome.status == "interrupted":
        output.note(outcome.message)
    else:
        output.error(outcome.message)
        _print_console(trial, run.attempt_numbers()[-1])
    raise typer.Exit(outcome.exit_code)


def _print_plan(resolved: Resolved, trial: Trial, as_json: bool) -> None:
    config = resolved.config.model_copy(update={"trial_name": trial.run.trial})
    plan = RunPlan(config, trial)
    if as_json:
        output.result_json({"config": shown_values(config), "plan": plan.as_dict()})
        return
    output.result(yaml.safe_dump(shown_values(config), sort_keys=False, allow_unicode=True))
    # As comments: the whole output is the YAML that would be written.
    output.result("\n".join(["#", "# The plan (nothing has been written)", *(f"# {line}" for line in plan.lines())]))


def _print_complete(trial: Trial, as_json: bool) -> None:
    summary = read_summary(trial.run)
    if as_json:
        output.result_json(RunOutcome("completed", 0, "", summary, trial.history.global_step).as_dict(trial.run))
    output.note(f"{trial.run.experiment}/{trial.run.trial} is complete: nothing is left to train.")
    _print_closing(trial, summary, as_json)


def _print_closing(trial: Trial, summary: dict[str, object] | None, as_json: bool) -> None:
    run = trial.run
    if not as_json:
        if summary is None:
            output.note(
                f"warning: there is no readable closing table at {run.summary}; the numbers are in {run.metrics}"
            )
        else:
            output.result("\n".join(summary_lines(summary)))
    steps = read_history(run.metrics).global_step
    lines = [
        "",
        "Next:",
        f"  look at it      clusterkit status --experiment {run.experiment} --trial {run.trial}",
        f"  train further   {further_command(sys.argv[1:], run.trial, 2 * steps or 1)}",
        "  train anew      the same command with seed=2 trial_name=NEW",
    ]
    if run.tensorboard.is_dir():
        lines.append(f"  see the curves  tensorboard --logdir {run.tensorboard}")
    output.note("\n".join(lines))


def _print_console(trial: Trial, attempt: int) -> None:
    """With --debug: the end of what the trainer printed and of its log, tracebacks included."""
    if not output.debug:
        return
    for path in (trial.run.console(attempt), trial.run.logs / "main.log"):
        output.note("\n".join([f"--- {path}", *last_lines(path, 60)]))
