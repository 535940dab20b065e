"""`clusterkit train`: resolve a preset, start the trainer, follow it to its end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from clusterkit.cli.target import Typed, for_training, told
from clusterkit.ui import output
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.config.resolve import Resolved
    from clusterkit.runs.trials import Trial

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def train(
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that differ from the preset's, such as seed=2."),
    ] = None,
    preset: str | None = typer.Option(None, "--preset", help="Preset, such as tiny; see clusterkit presets."),
    task: str | None = typer.Option(None, "--task", help="Task; the preset's default when left out."),
    fileroot: str | None = typer.Option(None, "--fileroot", help="Folder under which the run is written [./runs]."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the configuration and the plan; write nothing."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="Train on that cluster, which clusterkit setup made."
    ),
    here: bool = typer.Option(False, "--here", help="Train on this machine, whichever cluster is current."),
    slurm: bool = typer.Option(
        False, "--slurm", help="Submit it to Slurm, from a login node; also mode=slurm (docs/slurm.md)."
    ),
    detach: bool = typer.Option(
        False,
        "--detach/--follow",
        help="On a cluster: come back once it trains, with --slurm once it is submitted; or show it to its end.",
    ),
    partition: str = typer.Option("", "--partition", help="With --slurm: partition; sbatch's own default."),
    account: str = typer.Option("", "--account", help="With --slurm: account."),
    time: str = typer.Option("", "--time", help="With --slurm: time limit, as sbatch takes it (1-12:00:00)."),
    sbatch_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION", help="With --slurm: a further option of sbatch, such as --sbatch-option=--mem=0."
        ),
    ] = None,
    requeue: bool = typer.Option(
        False, "--requeue", help="With --slurm: back into the queue at the time limit or when a node fails."
    ),
    container_image: str = typer.Option(
        "", "--container-image", metavar="REF", help="With --slurm: image for pyxis or apptainer; else this Python."
    ),
    container_mount: Annotated[
        list[str] | None,
        typer.Option(metavar="/SRC[:/DST]", help="With --container-image: a folder that it sees besides the run's."),
    ] = None,
    recover_from: str | None = typer.Option(
        None,
        "--recover-from",
        metavar="EXPERIMENT/TRIAL|PATH",
        help="Start a new trial from another run's recover checkpoint (weights, optimizer and step number go on, other "
        "settings may change), or from a folder of weights (a new optimizer, from step 1).",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
    no_progress: bool = typer.Option(False, "--no-progress", help="Show no progress."),
) -> None:
    """Train a memory agent from a preset, or go on with an unfinished run.

    Presets without GPUs, such as tiny, train on this machine, all others on the current cluster (clusterkit use);
    --here and --cluster NAME say otherwise. Here, Ctrl-C writes a recover checkpoint; the same command then goes on
    where it stopped. A trainer that crashes is started again from it (recover_retries). On a cluster the run goes on
    without us: the same command attaches to it, clusterkit stop ends it.

    trainer.type=sft learns from examples (task.path=FILE.jsonl), trainer.type=null only writes trajectories and their
    rewards. agent.name, task.name and reward.name take module:Class for classes of your own.
    """
    from clusterkit.config.aliases import notes_of  # noqa: PLC0415
    from clusterkit.config.resolve import resolve  # noqa: PLC0415

    output.notes(notes_of(overrides or []))
    slurm = slurm or "mode=slurm" in (overrides or [])
    if slurm and (cluster is not None or here):
        raise UserError(f"{'--here' if here else '--cluster NAME'} and --slurm (mode=slurm) are two places: choose one")
    typed = [*(overrides or []), *([f"fileroot={fileroot}"] if fileroot is not None else [])]
    wishes = (partition, account, time, tuple(sbatch_option or ()), requeue)
    if not slurm:
        if any((*wishes, container_image, container_mount)):
            raise UserError("options for Slurm: add --slurm to submit the run, or leave them out")
        cluster = told(for_training(resolve(preset, task, typed), Typed(cluster, here, fileroot)))
    if recover_from is not None:
        from clusterkit.cli.train_from import settings_from  # noqa: PLC0415

        typed += settings_from(recover_from, preset, task, typed, cluster)
    if cluster is not None:
        from clusterkit.cli.train_cluster import train_on  # noqa: PLC0415

        train_on(cluster, preset, task, typed, dry_run=dry_run, detach=detach, as_json=as_json, shown=not no_progress)
        return
    if slurm:
        from clusterkit.backends.slurm.script import Wishes  # noqa: PLC0415
        from clusterkit.cli.train_slurm import train_on_slurm  # noqa: PLC0415

        train_on_slurm(
            preset,
            task,
            typed,
            Wishes(*wishes),
            image=container_image,
            mounts=container_mount or (),
            dry_run=dry_run,
            detach=detach,
            as_json=as_json,
            shown=not no_progress,
        )
        return
    from clusterkit.backends.local.launch import require_writable  # noqa: PLC0415
    from clusterkit.capacity.runnable import refusal  # noqa: PLC0415
    from clusterkit.runs.trials import Course, choose_trial  # noqa: PLC0415

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
    if trial.course is Course.COMPLETE:
        _print_complete(trial, as_json)
        return
    _train(resolved, trial, as_json, show_progress=not no_progress)


def _with_applied(resolved: Resolved, trial: Trial) -> Resolved:
    """The configuration with what `clusterkit diagnose --apply` left beside the run."""
    from dataclasses import replace  # noqa: PLC0415

    from clusterkit.runs.diagnose.applied import with_applied  # noqa: PLC0415
    from clusterkit.runs.trials import Course  # noqa: PLC0415

    if trial.course is Course.COMPLETE:
        return resolved
    config, notes = with_applied(resolved.config, trial.run)
    for note in notes:
        output.note(f"note: {note}")
    return replace(resolved, config=config)


def _train(resolved: Resolved, trial: Trial, as_json: bool, show_progress: bool) -> None:
    from clusterkit.backends.local.launch import trainer_command  # noqa: PLC0415
    from clusterkit.backends.local.train import Restarts, again_command, follow, prepared  # noqa: PLC0415
    from clusterkit.capacity.plan import Plan  # noqa: PLC0415
    from clusterkit.ui.progress import showing  # noqa: PLC0415

    run = trial.run
    config = resolved.config.model_copy(update={"trial_name": run.trial})
    plan = Plan(config, trial)
    beginning = plan.course  # before our own lock makes the run look busy
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
    import yaml  # noqa: PLC0415

    from clusterkit.capacity.plan import Plan  # noqa: PLC0415
    from clusterkit.config.resolve import shown_values  # noqa: PLC0415

    config = resolved.config.model_copy(update={"trial_name": trial.run.trial})
    plan = Plan(config, trial)
    if as_json:
        output.result_json({"config": shown_values(config), "plan": plan.as_dict()})
        return
    output.result(yaml.safe_dump(shown_values(config), sort_keys=False, allow_unicode=True))
    # As comments: the whole output is the YAML that would be written.
    output.result("\n".join(["#", "# The plan (nothing has been written)", *(f"# {line}" for line in plan.lines())]))


def _print_complete(trial: Trial, as_json: bool) -> None:
    from clusterkit.backends.local.train import Outcome  # noqa: PLC0415
    from clusterkit.runs.final_evaluation import read_summary  # noqa: PLC0415

    summary = read_summary(trial.run)
    if as_json:
        output.result_json(Outcome("completed", 0, "", summary, trial.history.global_step).as_dict(trial.run))
    output.note(f"{trial.run.experiment}/{trial.run.trial} is complete: nothing is left to train.")
    _print_closing(trial, summary, as_json)


def _print_closing(trial: Trial, summary: dict[str, object] | None, as_json: bool) -> None:
    from clusterkit.backends.local.train import further_command  # noqa: PLC0415
    from clusterkit.runs.final_evaluation import closing_lines  # noqa: PLC0415
    from clusterkit.runs.log.metrics import read_history  # noqa: PLC0415

    run = trial.run
    if not as_json:
        if summary is None:
            output.note(
                f"warning: there is no readable closing table at {run.summary}; the numbers are in {run.metrics}"
            )
        else:
            output.result("\n".join(closing_lines(summary)))
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
    from clusterkit.runs.log.console import last_lines  # noqa: PLC0415

    for path in (trial.run.console(attempt), trial.run.logs / "main.log"):
        output.note("\n".join([f"--- {path}", *last_lines(path, 60)]))
