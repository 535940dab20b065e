"""`clusterkit report`: write the page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import place_of_run
from clusterkit.cli.runoptions import RunOptions
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.rollouts import shown_files
from clusterkit.observe.report.source import RunReader
from clusterkit.ui import output
from clusterkit.ui.page_file import write_page


def report(run: RunOptions, compare: Sequence[str], out: str | None, *, as_json: bool) -> None:
    """Write a run, and those of `compare` over it, as one page. out: the file, or - for stdout."""
    with open_backend(place_of_run(run), output.note) as backend:
        runs = backend.runs()
        directories = runs.choose(run.experiment, run.trial, compare)
        for directory in directories:
            runs.fetch_heldout(directory)
            runs.index_steps(directory)
            for _, file in shown_files(directory)[-1:]:  # of a cluster's run only the newest: they may be large
                runs.fetch_step(file)
        read = [RunReader(directory).read() for directory in directories]
        names = [one.name for one in read]
        page = runs.with_original_paths(document(" against ".join(names), content(read, time.time())))
    if out == "-":
        output.result(page)
        return
    name = "-".join([directories[0].experiment, *(directory.trial for directory in directories)])
    path = write_page(page, Path(out).expanduser() if out else Path(f"{name}.html"))
    if as_json:
        output.result_json({"path": str(path), "bytes": path.stat().st_size, "runs": names})
    else:
        output.result(str(path))
        output.note("Open it with a web browser; it can be sent or kept as it is.")
