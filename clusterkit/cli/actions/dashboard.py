"""`clusterkit dashboard`: serve the page until Ctrl-C."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack

from clusterkit.cli.actions.target import RUNS, cluster_of_run, folder_of_runs
from clusterkit.observe.report.dashboard import Dashboard, Views
from clusterkit.ui import output


def dashboard(
    experiment: str | None,
    trial: str | None,
    compare: str | None,
    port: int,
    fileroot: str | None,
    cluster: str | None,
    here: bool,
) -> None:
    """Serve runs of this machine or of a cluster."""
    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    with ExitStack() as stack:
        if cluster is None:
            views = Views(folder_of_runs(fileroot), experiment, trial, compare)
        else:
            from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415 (asyncssh, only for runs of a cluster)

            mirror = stack.enter_context(mirror_of(cluster, fileroot or RUNS))
            mirror.choose(experiment, trial, compare)  # what is wrong is told here, not to the browser
            views = Views(mirror.folder, experiment, trial, compare, mirror)
        server = stack.enter_context(Dashboard(port, views))
        output.result(server.url)
        if os.environ.get("SSH_CONNECTION"):
            tunnel = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} {platform.node()}"
            output.note(f"On your own computer: {tunnel}    then open the address above there.")
        output.note("Ctrl-C ends it.")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            output.note("The dashboard has ended; runs go on.")
