"""Which run of a cluster was started last, and which is alive: enough to tell where a command goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from clusterkit.backends.base import RunSelector
from clusterkit.backends.ray.head import Head
from clusterkit.backends.ray.storage import ListedRun, newest_run
from clusterkit.provision.ray.token import read_token
from clusterkit.runs.directory import RunDirectory, user_name
from clusterkit.ssh.api import HostError
from clusterkit.ssh.connection import connect
from trainer.errors import RunError

if TYPE_CHECKING:
    from clusterkit.hosts.model import Host
    from clusterkit.ssh.selection import Selection


async def newest_of(head: Head, selector: RunSelector) -> ListedRun | None:
    """The run that was started last, among those that fit; None without any."""
    user = selector.user or user_name()
    return await newest_run(head.session, selector.fileroot or head.fileroot, user, selector.experiment, selector.trial)


async def require_newest(head: Head, selector: RunSelector) -> RunDirectory:
    """The same. Raises RunError where there is none."""
    found = await newest_of(head, selector)
    if found is None:
        raise RunError(f"no run {selector} of {selector.user or user_name()} on cluster {head.cluster.name}")
    return found.run


async def through_any(selection: Selection, work: Callable[[Head], Awaitable[ListedRun | None]]) -> ListedRun | None:
    """Do something on the head node, or on whichever other host answers first.

    Raises:
        RunError: none answers, with the reason of each.
    """
    cluster, problems = selection.cluster, []

    async def on(host: Host) -> ListedRun | None:
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
