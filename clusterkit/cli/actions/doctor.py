"""`clusterkit doctor`: look at this machine and print what it can run."""

from __future__ import annotations

import typer

from clusterkit.backends.base import folder_of_runs
from clusterkit.capacity.doctor import diagnose, lines_of
from clusterkit.ui import output


def show(fileroot: str, cache_dir: str, as_json: bool) -> None:
    """Print it; exit code 1 where nothing can be trained here."""
    found = diagnose(folder_of_runs(fileroot or None), cache_dir)
    output.outcome("\n".join(lines_of(found)), found.as_dict(), as_json=as_json)
    if not found.can_run:
        raise typer.Exit(1)
