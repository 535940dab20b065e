"""`clusterkit stop`: end the run that is meant."""

from __future__ import annotations

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import Kind, place_of_run, selector_of
from clusterkit.cli.runoptions import RunOptions
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output


def stop(run: RunOptions, hosts: HostOptions, *, deadline: float, force: bool, as_json: bool) -> None:
    """End the run, and say how it ended."""
    selector = selector_of(run)
    with open_backend(place_of_run(run, Kind.LIVING_RUN, hosts), output.note) as backend:
        stopped = backend.stop(selector, deadline=deadline, force=force)
    output.outcome(stopped.message, stopped, as_json=as_json)
