"""`clusterkit setup`: make the hosts a cluster, and report."""

from __future__ import annotations

import typer

from clusterkit.cli.actions.target import hosts_of_cluster
from clusterkit.config.aliases import translation_notes
from clusterkit.setup.command import nothing_failed, only_failed, run_setup
from clusterkit.setup.typed import SetupOptions
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ssh.selection import Selection, select
from clusterkit.ui import output


def setup(hosts: HostOptions, options: SetupOptions, *, retry: bool, as_json: bool) -> None:
    """Set the cluster up; the exit code is the report's. retry: only the hosts that failed last."""
    output.notes(translation_notes(options.settings))
    selection: Selection | None = select(hosts_of_cluster(hosts))
    assert selection is not None
    cluster = selection.cluster
    if retry:
        selection = only_failed(selection)
    outcome = nothing_failed(cluster) if selection is None else run_setup(selection, options)
    output.outcome(outcome.text, outcome.as_dict(), as_json=as_json)
    raise typer.Exit(outcome.exit_code)
