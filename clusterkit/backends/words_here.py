"""How printed commands name a run in a folder of this machine. Light: `clusterkit` alone needs it, and no backend."""

from __future__ import annotations

import shlex

from clusterkit.provision.ray.current import has_current
from clusterkit.runs.directory import RUNS, RunDirectory, folder_of_runs


def words_here(run: RunDirectory) -> str:
    """Return words such as `tiny-recall/run1 --here`; see `Backend.words`."""
    if run.fileroot != folder_of_runs(RUNS):
        place = f" --fileroot {shlex.quote(str(run.fileroot))}"
    else:
        place = " --here" if has_current() else ""  # the cluster would be asked, too
    return f"{run.word}{place}"
