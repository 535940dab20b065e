"""`clusterkit alerts`: send failures, stalls and the end of a run to a webhook or a command."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.cli import output

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def alerts(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str = typer.Option("runs", "--fileroot", help="Folder under which runs are."),
    webhook: str | None = typer.Option(
        None,
        "--webhook",
        metavar="SOURCE",
        help="Where the webhook's address is: file:PATH or env:NAME [env:CLUSTERKIT_WEBHOOK].",
    ),
    command: str | None = typer.Option(None, "--command", help="Run this instead, with the JSON on its input."),
    every: float = typer.Option(60.0, "--every", min=0.1, help="Seconds between two looks."),
    once: bool = typer.Option(False, "--once", help="Look once; for cron."),
) -> None:
    """Watch a run; send a failure, a stall, a stop and the end, each once, as JSON.

    Goes on until the run is complete or Ctrl-C. What was delivered is noted beside the run: a second watcher does not
    repeat it.
    """
    from clusterkit.alerts.delivery import command_from, webhook_from  # noqa: PLC0415
    from clusterkit.alerts.watch import Watcher  # noqa: PLC0415
    from clusterkit.status import find_run  # noqa: PLC0415
    from trainer.errors import UserError  # noqa: PLC0415

    if command is not None and webhook is not None:
        raise UserError("--webhook and --command are two receivers: give one, and start a second watcher for the other")
    receiver = command_from(command) if command is not None else webhook_from(webhook)
    run = find_run(Path(fileroot).expanduser().absolute(), experiment, trial)
    watcher = Watcher(run, receiver, output.note)
    if once:
        _, sent = watcher.look()
        raise typer.Exit(0 if sent else 1)
    output.note(f"watching {run.experiment}/{run.trial} every {every:g} s; Ctrl-C ends it")
    try:
        watcher.watch(every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
