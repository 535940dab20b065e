"""`clusterkit train --cluster`: start the run there, or attach to it, and follow it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import yaml

from clusterkit.backends.local.train import again_command
from clusterkit.backends.ray.follow import follow
from clusterkit.backends.ray.submit import RunRequest
from clusterkit.backends.ray.train import order_of, train
from clusterkit.capacity.plan import remote_plan
from clusterkit.capacity.runnable import require_runnable
from clusterkit.cli.actions import submitted
from clusterkit.config.resolve import shown_values
from clusterkit.ssh.api import HostError
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output
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
    again = again_command(sys.argv[1:])
    submitted.show(
        dispatched,
        f"--cluster {cluster}",
        lambda progress: asyncio.run(follow(selection, dispatched, progress, again)),
        detach=detach,
        as_json=as_json,
        shown=shown,
    )


def _print_plan(order: RunRequest, as_json: bool) -> None:
    config, plan = shown_values(order.config), remote_plan(order.config)
    if as_json:
        planned = {"steps": plan.steps, "ranks": order.config.ranks, "gpus": order.config.gpus}
        output.result_json({"config": config, "cluster": order.cluster.name, "plan": planned})
        return
    output.result(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    lines = plan.remote_lines(f"on cluster {order.cluster.name}")
    heading = f"The plan, on cluster {order.cluster.name} (nothing has been written or started)"
    output.result("\n".join(["#", f"# {heading}", *(f"# {line}" for line in lines)]))
