"""Options that several commands have, spelled and explained alike."""

from __future__ import annotations

import typer

HERE_OPTION = typer.Option(False, "--here", help="Runs of this machine, whichever cluster is current.")
CLUSTER_OPTION = typer.Option(
    None, "--cluster", metavar="NAME", help="Runs of that cluster; --fileroot is then a folder there."
)
USER_OPTION = typer.Option(None, "--user", metavar="NAME", help="Of that user, instead of your own.")
FILEROOT_OPTION = typer.Option(None, "--fileroot", help="Folder of this machine under which runs are [./runs].")

LOOPBACK = "127.0.0.1"
"""Where servers listen that nobody but this machine asks."""
