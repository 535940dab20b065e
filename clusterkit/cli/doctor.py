"""`clusterkit doctor`: what this machine can run, and what to type next."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CACHE_OPTION, JSON_OPTION, new_app

app = new_app()


@app.command(
    examples="""
clusterkit doctor
clusterkit doctor --json
"""
)
def doctor(
    fileroot: str = typer.Option("", "--fileroot", metavar="FOLDER", help="Folder under which runs are [./runs]."),
    cache_dir: str = CACHE_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Say what this machine can run: processors, GPUs, driver, engines, disks, presets that fit; and what to type next.

    It looks at this machine only, for a second or so, and changes nothing. Exit codes: 0, or 1 where no preset can be
    trained here.
    """
    actions.doctor.show(fileroot, cache_dir, as_json)
