"""`clusterkit dashboard`: the report's page, live in a browser on this machine."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack

import typer

from clusterkit.cli.target import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION, RUNS, cluster_of_run, folder_of_runs
from clusterkit.ui import output

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

DEFAULT_PORT = 8400


@app.command()
def dashboard(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    compare: str | None = typer.Option(
        None, "--compare", help="A second run to draw beside it.", metavar="TRIAL or EXPERIMENT/TRIAL"
    ),
    port: int = typer.Option(DEFAULT_PORT, "--port", help="Port on 127.0.0.1; 0 takes a free one.", min=0, max=65535),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = CLUSTER_OPTION,
    here: bool = HERE_OPTION,
) -> None:
    """Serve the runs as a live page to browsers on this machine, until Ctrl-C. It changes nothing.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which.
    """
    from clusterkit.observe.report.dashboard import Dashboard, Views  # noqa: PLC0415

    cluster = cluster_of_run(cluster, here, fileroot, experiment, trial)
    with ExitStack() as stack:
        if cluster is None:
            views = Views(folder_of_runs(fileroot), experiment, trial, compare)
        else:
            from clusterkit.backends.ray.sync_mirror import mirror_of  # noqa: PLC0415

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
