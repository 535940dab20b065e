"""`clusterkit serve`: list, add and end the engine servers of a run, here or on a cluster."""

from __future__ import annotations

import asyncio

from clusterkit.backends.ray.head import head_of
from clusterkit.cli.actions.target import Kind, checked_user, folder_of_runs, hosts_of_run, kind_for
from clusterkit.runs.directory import RunDirectory
from clusterkit.runs.status import find_run
from clusterkit.serving.engines import (
    add_local,
    change_remote,
    newest_remote_run,
    remote_servers,
    stop_local,
    table,
    views,
)
from clusterkit.serving.engines import local_servers as servers_here
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from trainer.errors import RunError, UserError
from trainer.serving.registry import Registration, folder_of


def list_servers(
    hosts: HostOptions,
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    here: bool,
    user: str | None,
    as_json: bool,
) -> None:
    """Print a run's servers."""
    place = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        found = views(servers_here(_run(fileroot, experiment, trial, user)))
    else:
        found = views(asyncio.run(_servers_of(select(place), experiment, trial, user)))
    if as_json:
        output.result_json({"servers": [view.as_dict() for view in found]})
        return
    for line in table(found):
        output.result(line)


def add(
    hosts: HostOptions,
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    here: bool,
    user: str | None,
    *,
    gpus: str,
    model: str,
) -> None:
    """Add one server to a run."""
    on_this = here or (bool(gpus) and hosts.cluster is None)
    place = hosts_of_run(hosts, on_this, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        try:
            numbers = tuple(int(number) for number in gpus.split(",") if number.strip())
        except ValueError:
            raise UserError(f"--gpus {gpus}: give numbers with commas, such as 4,5") from None
        one = add_local(_run(fileroot, experiment, trial, user), numbers, model, output.note)
        output.result(f"{one.name} answers at {one.url}")
        return
    output.result(_on_cluster(select(place), experiment, trial, "add", "", user))


def stop(
    hosts: HostOptions,
    names: list[str],
    experiment: str | None,
    trial: str | None,
    fileroot: str | None,
    here: bool,
    user: str | None,
) -> None:
    """End servers of a run; without names all."""
    place = hosts_of_run(hosts, here, fileroot, experiment, trial, kind=kind_for(user, Kind.NEWEST_RUN))
    if place is None:
        ended = stop_local(_run(fileroot, experiment, trial, user), names)
        output.result(f"ended: {', '.join(ended)}" if ended else "the run has no engine servers")
        return
    selection = select(place)
    if not names:
        names = [one.name for one in asyncio.run(_servers_of(selection, experiment, trial, user))]
        if not names:
            raise RunError("the run has no engine servers")
    for name in names:
        output.result(_on_cluster(selection, experiment, trial, "stop", name, user))


def _run(fileroot: str | None, experiment: str | None, trial: str | None, user: str | None) -> RunDirectory:
    return find_run(folder_of_runs(fileroot), experiment, trial, None if user is None else checked_user(user))


async def _servers_of(
    selection: Selection, experiment: str | None, trial: str | None, user: str | None
) -> list[Registration]:
    """Engine servers of a run on a cluster."""
    async with head_of(selection) as head:
        run = await newest_remote_run(head, experiment, trial, checked_user(user))
        return await remote_servers(head, folder_of(run.logs))


def _on_cluster(
    selection: Selection, experiment: str | None, trial: str | None, action: str, name: str, user: str | None
) -> str:
    async def do() -> str:
        async with head_of(selection) as head:
            return await change_remote(
                head, await newest_remote_run(head, experiment, trial, checked_user(user)), action, name
            )

    return asyncio.run(do())
