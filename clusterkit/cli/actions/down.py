"""`clusterkit down`: show what is of the cluster, ask, and remove it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import typer

from clusterkit.cli.actions.target import hosts_of_cluster
from clusterkit.hosts import inventory
from clusterkit.provision.cluster_lock import local_lock, remote_lease
from clusterkit.provision.ray.current import forget as forget_choice
from clusterkit.provision.ray.hosts import Connected, connected
from clusterkit.provision.ray.observe import RayAnswer, ask_ray
from clusterkit.provision.ray.remove import Leftovers, leftovers, remove
from clusterkit.provision.ray.token import forget_token, local_file
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import HostError
from clusterkit.ssh.connection import connect
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from trainer.errors import UserError


def down(hosts: HostOptions, *, yes: bool, users: list[str], as_json: bool) -> None:
    """Take the cluster off its hosts; the exit code says what became of it."""
    if yes and hosts.cluster is None and hosts.hostnames is None and len(inventory.cluster_names()) > 1:
        names = ", ".join(inventory.cluster_names())
        raise UserError(f"-y asks no questions, and there are several clusters ({names}): add --cluster NAME")
    if as_json and not yes:
        raise UserError("--json asks no questions: add -y to remove what is found")
    code = asyncio.run(_down(select(hosts_of_cluster(hosts)), yes, as_json, users))
    if code:
        raise typer.Exit(code)


async def _down(selection: Selection, yes: bool, as_json: bool, users: list[str]) -> int:
    cluster = selection.cluster
    names = {host.name for host in selection.hosts}
    # The head tells whose runs are alive, also where nothing of its own is to be removed.
    reached = selection.hosts if cluster.head_host.name in names else (*selection.hosts, cluster.head_host)
    with local_lock(cluster.name, "down") as owner:
        async with connected(reached, lambda host: connect(host, selection.ssh)) as hosts:
            sessions = {name: session for name, session in hosts.sessions.items() if name in names}
            found, silent = await leftovers(sessions, cluster.name)
            silent = {name: error for name, error in {**hosts.unreachable, **silent}.items() if name in names}
            # Where nothing is of ours, a lease would be the first thing that is.
            remains = [name for name, what in found.items() if not what.empty]
            head = cluster.head_host.name
            ordered = [head, *(name for name in remains if name != head)] if remains else []
            sessions_left = [hosts.sessions[name] for name in ordered if name in hosts.sessions]
            async with remote_lease(owner, sessions_left) as refused:
                found = {name: what for name, what in found.items() if name not in refused}
                return await _remove(selection, hosts, found, {**silent, **refused}, yes, as_json, users)


async def _remove(
    selection: Selection,
    hosts: Connected,
    found: Mapping[str, Leftovers],
    silent: Mapping[str, HostError],
    yes: bool,
    as_json: bool,
    users: list[str],
) -> int:
    cluster = selection.cluster
    troubles = {name: error.message for name, error in silent.items()}
    remains = {name: what for name, what in found.items() if not what.empty}
    ray = await _ray(selection, hosts) if remains else None
    _refuse_others(ray, users)
    if remains and not as_json:
        output.note("\n".join([f"of cluster {cluster.name}:", *_shown(remains, cluster.name)]))
        if ray is not None and ray.jobs:
            output.note(f"running now, and ended by this: {', '.join(ray.jobs)}")
    if remains and (ray is None or ray.error):
        output.note("Ray does not answer: whose runs are ended by this cannot be told")
    # In a thread, so that the connections stay alive while somebody thinks.
    if remains and not yes and not await asyncio.to_thread(_agreed):
        output.note("nothing was removed")
        return 1
    if remains and not yes:  # somebody may have started a run meanwhile
        _refuse_others(await _ray(selection, hosts), users)
    failed = await remove(hosts.sessions, cluster, remains)
    troubles |= {name: error.message if isinstance(error, HostError) else error for name, error in failed.items()}
    # The token goes when no host has it any more.
    if not troubles and len(selection.hosts) == len(cluster.hosts) and local_file(cluster.name).exists():
        forget_token(cluster.name)
    if not troubles and len(selection.hosts) == len(cluster.hosts) and forget_choice(cluster.name):
        output.note(f"{cluster.name} is no longer the current cluster")
    removed = {name: what.lines(cluster.name) for name, what in remains.items() if name not in failed}
    if as_json:
        output.result_json({"cluster": cluster.name, "removed": removed, "failed": troubles})
    else:
        output.result(_summary(cluster.name, removed, len(found)))
        for name, message in troubles.items():
            output.note(f"{name}: {message}; what it has is still there: run the same command again later")
    if not troubles:
        return 0
    return 1 if len(troubles) == len(selection.hosts) else 3


async def _ray(selection: Selection, hosts: Connected) -> RayAnswer | None:
    """What the head's Ray says of its jobs; None where its host cannot be asked."""
    head = hosts.sessions.get(selection.cluster.head_host.name)
    if head is None:
        return None
    try:
        return await ask_ray(head, selection.cluster.name)
    except HostError:
        return None


def _refuse_others(ray: RayAnswer | None, users: list[str]) -> None:
    """Raise UserError where users have living jobs who are neither us nor named, as far as Ray can be asked."""
    living = {} if ray is None else ray.users
    others = {job: user for job, user in living.items() if user not in (user_name(), *users)}
    if not others:
        return
    names = sorted(set(others.values()))
    named = " ".join(f"--user {name}" for name in names)
    running = ", ".join(f"{job} of {user}" for job, user in others.items())
    raise UserError(
        f"running now, and not yours: {running}. Nothing was removed. Ask them first; to end what they run and remove "
        f"all the same: {named}"
    )


def _shown(remains: Mapping[str, Leftovers], cluster: str) -> list[str]:
    return [f"  {name}: {line}" for name, what in remains.items() for line in what.lines(cluster)]


def _summary(cluster: str, removed: Mapping[str, list[str]], num_hosts: int) -> str:
    if not removed:
        return f"nothing of cluster {cluster} was removed from {num_hosts} host(s)"
    count = sum(len(lines) for lines in removed.values())
    return f"removed {count} thing(s) of cluster {cluster} from {len(removed)} host(s)"


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UserError("stdin is no terminal to ask on: add -y to remove this")
    return typer.confirm("Remove this?", default=False, err=True)
