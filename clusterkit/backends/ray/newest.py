"""Which run of a cluster was started last, and which is alive: enough to tell where a command goes."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterkit.backends.ray.files import run_checked
from clusterkit.backends.ray.head import Head, head_of
from clusterkit.backends.ray.storage import fileroot_of
from clusterkit.provision.ray.token import read_token
from clusterkit.runs.directory import user_name
from clusterkit.ssh.api import HostError
from clusterkit.ssh.connection import connect
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from trainer.errors import RunError

if TYPE_CHECKING:
    from clusterkit.hosts.model import Host
    from clusterkit.ssh.selection import Selection


@dataclass(frozen=True)
class Newest:
    """A run of the cluster. name: EXPERIMENT/TRIAL. started_ago: seconds since its last start, by the host's clock."""

    name: str
    started_ago: float


def newest_run(cluster: str, experiment: str | None, trial: str | None) -> Newest | None:
    """This user's run of that name that was written to last; None where the cluster has none.

    Raises:
        RunError: no host shows the storage.

    """
    return asyncio.run(
        _through_any(select(HostOptions(cluster=cluster)), lambda head: _newest(head, experiment, trial))
    )


def living_run(cluster: str, experiment: str | None, trial: str | None) -> Newest | None:
    """This user's run of that name that is alive, whichever if there are several; None where none is.

    Raises:
        RunError: Ray cannot be asked. UserError: this machine knows no Ray of the cluster.

    """

    async def look() -> Newest | None:
        async with head_of(select(HostOptions(cluster=cluster))) as head, head.jobs() as jobs:
            for job in await jobs.all():
                data = job.metadata
                if (
                    job.alive
                    and (data.get("kind"), data.get("user")) == ("clusterkit-train", user_name())
                    and experiment in (None, data.get("experiment"))
                    and trial in (None, data.get("trial"))
                ):
                    return Newest(f"{data.get('experiment')}/{data.get('trial')}", 0.0)
        return None

    try:
        return asyncio.run(look())
    except HostError as error:
        raise RunError(str(error)) from error


async def _newest(head: Head, experiment: str | None, trial: str | None) -> Newest | None:
    folder = f"{fileroot_of(head.cluster)}/logs/{user_name()}"
    script = rf"""date +%s.%N
cd {shlex.quote(folder)} 2>/dev/null || exit 0
find . -ignore_readdir_race -mindepth 3 -maxdepth 3 -type f \
  \( -name metrics.jsonl -o -name config.yaml \) -printf '%T@ %P\n'
"""
    now, *lines = (await run_checked(head, script)).splitlines()
    written: dict[tuple[str, str], float] = {}
    started: dict[tuple[str, str], float] = {}
    for line in lines:
        moment, _, path = line.partition(" ")
        parts = path.split("/")
        if len(parts) != 3 or experiment not in (None, parts[0]) or trial not in (None, parts[1]):
            continue
        run = (parts[0], parts[1])
        written[run] = max(written.get(run, 0.0), float(moment))
        if parts[2] == "config.yaml":  # written by every start
            started[run] = float(moment)
    if not written:
        return None
    newest = max(written, key=lambda run: written[run])
    return Newest("/".join(newest), float(now) - started.get(newest, written[newest]))


async def _through_any(selection: Selection, work: Callable[[Head], Awaitable[Newest | None]]) -> Newest | None:
    """Do it on the head, or on whichever other host answers first.

    Raises:
        RunError: none answers, with the reason of each.

    """
    cluster, problems = selection.cluster, []

    async def on(host: Host) -> Newest | None:
        async with asyncio.timeout(2 * selection.ssh.connect_timeout):
            session = await connect(host, selection.ssh)
            try:
                return await work(Head(session, cluster, read_token(cluster.name)))
            finally:
                await session.close()

    others = [host for host in cluster.hosts if host.name != cluster.head_host.name]
    for hosts in ([cluster.head_host], others):
        tasks = [asyncio.create_task(on(host), name=host.name) for host in hosts]
        try:
            for task in asyncio.as_completed(tasks):
                try:
                    return await task
                except HostError as error:
                    problems.append(str(error).splitlines()[0])
                except TimeoutError:
                    problems.append("a host does not answer")
        finally:
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    raise RunError("; ".join(dict.fromkeys(problems)))
