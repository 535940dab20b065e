"""`clusterkit train --cluster`: start the run there, or attach to it, and follow it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import typer
import yaml

from clusterkit.backends.local.train import RunOutcome, again_command
from clusterkit.backends.ray.follow import follow
from clusterkit.backends.ray.submit import RunRequest, SubmittedRun
from clusterkit.backends.ray.train import order_of, train
from clusterkit.capacity.plan import elsewhere
from clusterkit.capacity.runnable import require_runnable
from clusterkit.config.resolve import shown_values
from clusterkit.runs.final_evaluation import closing_lines
from clusterkit.ssh.api import HostError
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from clusterkit.ui.progress import showing
from trainer.errors import RunError


def train_on(
    cluster: str,
    preset: str | None,
    task: str | None,
    overrides: Sequence[str],
    *,
    dry_run: bool,
    detach: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Do what `clusterkit train --cluster` says. Exit codes as for a run of this machine; 0 for a run detached from.

    Raises:
        UserError, RunError: with what to do.

    """
    selection = select(HostOptions(cluster=cluster))
    order, assets, resolved = order_of(selection.cluster, preset, task, overrides)
    require_runnable(resolved.config)
    if dry_run:
        _print_plan(order, as_json)
        return
    try:
        dispatched = asyncio.run(train(selection, order, assets, output.note))
    except HostError as error:
        raise RunError(str(error)) from error
    output.note(f"{dispatched.sentence}. Folder on the cluster: {dispatched.run.logs}")
    if detach or dispatched.state == "complete":
        if as_json:
            output.result_json(dispatched.as_dict())
        output.note(_how_to_go_on(cluster, dispatched))
        return
    _follow(selection, dispatched, as_json, shown)


def _follow(selection: Selection, dispatched: SubmittedRun, as_json: bool, shown: bool) -> None:
    run = dispatched.run
    with showing(f"{run.experiment}/{run.trial}", shown) as progress:
        try:
            outcome = asyncio.run(follow(selection, dispatched, progress, again_command(sys.argv[1:])))
        except KeyboardInterrupt:
            output.note(f"detached: {dispatched.sentence}\n{_how_to_go_on(selection.cluster.name, dispatched)}")
            raise typer.Exit(0) from None
    _print_outcome(outcome, dispatched, as_json)
    if outcome.exit_code == 0 and outcome.summary is not None and not as_json:
        output.result("\n".join(closing_lines(outcome.summary)))
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _print_outcome(outcome: RunOutcome, dispatched: SubmittedRun, as_json: bool) -> None:
    if as_json:
        output.result_json({**dispatched.as_dict(), **outcome.as_dict(dispatched.run)})
    if outcome.status == "interrupted":
        output.note(outcome.message)
    elif outcome.message:
        output.error(outcome.message)


def _how_to_go_on(cluster: str, dispatched: SubmittedRun) -> str:
    named = f"--cluster {cluster} --experiment {dispatched.run.experiment} --trial {dispatched.run.trial}"
    return "\n".join(
        [
            f"  look at it  clusterkit status {named}",
            f"  its log     clusterkit logs -f {named}",
            f"  stop it     clusterkit stop {named}",
        ]
    )


def _print_plan(order: RunRequest, as_json: bool) -> None:
    config, plan = shown_values(order.config), elsewhere(order.config)
    if as_json:
        planned = {"steps": plan.steps, "ranks": order.config.ranks, "gpus": order.config.gpus}
        output.result_json({"config": config, "cluster": order.cluster.name, "plan": planned})
        return
    output.result(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    lines = plan.lines_elsewhere(f"on cluster {order.cluster.name}")
    heading = f"The plan, on cluster {order.cluster.name} (nothing has been written or started)"
    output.result("\n".join(["#", f"# {heading}", *(f"# {line}" for line in lines)]))
