"""`clusterkit report`: a run as one web page."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import COMPARE_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()


@app.command(
    examples="""
clusterkit report
clusterkit report tiny-recall/run2 --compare run1 --out -
clusterkit report --log main.log --out run.html
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here")
def report(
    *,
    run: RunOptions,
    compare: list[str] | None = COMPARE_OPTION,
    out: str | None = typer.Option(
        None,
        "--out",
        metavar="FILE",
        help="The file to write, or - for stdout; EXPERIMENT-TRIAL.html here when left out.",
    ),
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Draw this log instead: AReaL's of any version, or ours; - for stdin."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write a run's rewards, lengths, times, checkpoints and restarts as one web page that needs nothing else.

    Without a name it goes to the run that was started last, on this machine or on the current cluster; --here and
    --cluster NAME say which.
    """
    if log is not None:
        actions.report.report_log(log, run, compare or [], out, as_json=as_json)
    else:
        actions.report.report(run, compare or [], out, as_json=as_json)
