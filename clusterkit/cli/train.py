"""`clusterkit train`: resolve a preset, start the trainer, follow it to its end."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import new_app
from clusterkit.cli.runoptions import RunOptions, takes_run
from clusterkit.cli.trainoptions import TrainOptions

app = new_app()


@app.command(
    examples="""
clusterkit train --preset tiny
clusterkit train --preset tiny seed=2 trial_name=seed2
clusterkit train --preset tiny --sweep seed=1,2
clusterkit train --preset 7B_n4 --task memagent --dry-run
clusterkit train --preset 1.5B_n1 --slurm --time 1-0
"""
)
@takes_run("fileroot", "cluster", "here")
def train(
    *,
    run: RunOptions,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that differ from the preset's, such as seed=2."),
    ] = None,
    preset: str | None = typer.Option(
        None, "--preset", metavar="NAME", help="Preset, such as tiny; see clusterkit presets."
    ),
    task: str | None = typer.Option(None, "--task", metavar="NAME", help="Task; the preset's default when left out."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the configuration and the plan; write nothing."),
    slurm: bool = typer.Option(
        False, "--slurm", help="Submit it to Slurm, from a login node; also mode=slurm (docs/slurm.md)."
    ),
    detach: bool = typer.Option(
        False,
        "--detach/--follow",
        help="On a cluster: come back once it trains, with --slurm once it is submitted; or show it to its end.",
    ),
    partition: str = typer.Option(
        "", "--partition", metavar="NAME", help="With --slurm: partition; sbatch's own default."
    ),
    account: str = typer.Option("", "--account", metavar="NAME", help="With --slurm: account."),
    time: str = typer.Option(
        "", "--time", metavar="LIMIT", help="With --slurm: time limit, as sbatch takes it (1-12:00:00)."
    ),
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
        metavar="EXPERIMENT/TRIAL|FOLDER",
        help="Start a new trial from another run's recover checkpoint (weights, optimizer and step number go on, other "
        "settings may change), or from a folder of weights (a new optimizer, from step 1).",
    ),
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="A trial for each of these values, named after it; given several times: for each combination.",
        ),
    ] = None,
    config: str | None = typer.Option(None, "--config", hidden=True, help="Refused, with the command that does it."),
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

    --sweep train.learning_rate=1e-5,2e-5 trains one trial after another here, and submits one job a trial on a cluster
    or Slurm; a table follows at the end. The same command goes on where it stopped.
    """
    if config is not None:
        actions.train.refuse_config(config)
    slurm_options = {
        "partition": partition,
        "account": account,
        "time": time,
        "options": tuple(sbatch_option or ()),
        "requeue": requeue,
        "image": container_image,
        "mounts": tuple(container_mount or ()),
    }
    typed = TrainOptions(
        overrides=overrides or [],
        preset=preset,
        task=task,
        run=run,
        slurm=slurm,
        slurm_options=slurm_options,
        recover_from=recover_from,
        dry_run=dry_run,
        detach=detach,
        as_json=as_json,
        shown=not no_progress,
    )
    if sweep:
        actions.sweep.sweep(sweep, typed)
    else:
        actions.train.train(typed)
