"""`clusterkit dashboard`: serve the page until Ctrl-C."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.observe.report.dashboard import Dashboard, Views
from clusterkit.ui import output


def dashboard(run: RunOptions, compare: Sequence[str], port: int) -> None:
    """Serve a run's page, with those of `compare` over it, on a port of this machine."""
    with open_backend(place_of_run(run), output.note) as backend:
        runs = backend.runs()
        if backend.where:
            runs.choose(run.experiment, run.trial, compare)  # what is wrong is told here, not to the browser
        views = Views(runs.folder, run.experiment, run.trial, compare, runs)
        with Dashboard(port, views) as server:
            try:
                output.result(server.url)
                if os.environ.get("SSH_CONNECTION"):
                    tunnel = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} {platform.node()}"
                    output.note(f"On your own computer: {tunnel}    then open the address above there.")
                output.note("Ctrl-C ends it.")
                server.serve_forever()
            except KeyboardInterrupt:
                output.note("The dashboard has ended; runs go on.")
