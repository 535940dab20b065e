"""`clusterkit logs` of a run on a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clusterkit.backends.ray.head import Backoff, head_of
from clusterkit.backends.ray.storage import newest_attempt, newest_run, read_from, read_last, size_of
from clusterkit.cli.actions.logs import POLL_SECONDS, Which, log_of, write, write_tail
from clusterkit.ssh.api import HostError
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output
from trainer.errors import RunError


def show(
    hosts: HostOptions,
    experiment: str | None,
    trial: str | None,
    user: str,
    which: Which,
    *,
    lines: int,
    follow: bool,
) -> None:
    """Print the end of a log of a run there, and with `follow` what comes."""
    asyncio.run(_show(select(hosts), user, experiment, trial, which, lines, follow))


async def _show(
    selection: Selection,
    user: str,
    experiment: str | None,
    trial: str | None,
    which: Which,
    lines: int,
    follow: bool,
) -> None:
    path, offset, end, patience = Path(), -1, 0, Backoff()
    while True:
        try:
            async with head_of(selection) as head:
                if offset < 0:
                    run = await newest_run(head.session, head.fileroot, user, experiment, trial)
                    if run is None:
                        raise RunError(
                            f"no run {experiment or '*'}/{trial or '*'} of {user} on cluster {head.cluster.name}"
                        )
                    path = log_of(run, await newest_attempt(head.session, run), *which)
                    if lines:
                        tail, end = await read_last(head.session, path, lines)
                        write_tail(tail, path, lines)
                        offset = end
                    else:
                        offset, end = 0, await size_of(head.session, path)
                while follow or offset < end:
                    data = await read_from(head.session, path, offset)
                    write(data)
                    offset += len(data)
                    patience.reset()
                    if not data and not follow:
                        break  # it was truncated meanwhile
                    if not data:
                        await asyncio.sleep(POLL_SECONDS)
                return
        except HostError as error:
            if not follow or offset < 0:
                raise RunError(str(error)) from error
            output.note(f"cannot see the log for now ({error.message}); trying again")
            await patience.wait()
