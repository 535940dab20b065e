"""`clusterkit status --cluster`: a run there, its hosts, Ray and storage."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import typer

from clusterkit.backends.ray.status import watching
from clusterkit.backends.ray.view import cluster_lines
from clusterkit.cli.actions.status import WATCH_SECONDS, live_screen
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import select
from clusterkit.ui import output


def show(cluster: str, experiment: str | None, trial: str | None, user: str, *, as_json: bool, watch: bool) -> None:
    """Show a run and its cluster, once or until the run ends; the exit code says how they are."""

    async def look() -> int:
        async with watching(select(HostOptions(cluster=cluster)), experiment, trial, user) as eye:
            with contextlib.ExitStack() as stack:
                show = live_screen(stack) if watch and not as_json and sys.stdout.isatty() else output.result
                while True:
                    seen = await eye.look()
                    if not as_json:
                        show("\n".join(cluster_lines(seen)))
                    elif watch:
                        output.line_json(seen.as_dict())
                    else:
                        output.result_json(seen.as_dict())
                    if not watch or (seen.run is not None and not seen.run.alive and not seen.unseen):
                        return seen.exit_code
                    await asyncio.sleep(WATCH_SECONDS)

    if code := asyncio.run(look()):
        raise typer.Exit(code)
