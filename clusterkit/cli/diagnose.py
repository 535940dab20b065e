"""`clusterkit diagnose`: why a run failed, stands still or does not learn, and what to change."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import JSON_OPTION, new_app
from clusterkit.cli.runoptions import RunOptions, takes_run

app = new_app()


@app.command(
    examples="""
clusterkit diagnose
clusterkit diagnose tiny-recall/run2 --apply
clusterkit diagnose --log slurm-4711.out
"""
)
@takes_run("name", "experiment", "trial", "fileroot", "cluster", "here")
def diagnose(
    *,
    run: RunOptions,
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Any log by itself: of AReaL, SGLang, vLLM or Ray; - for stdin."
    ),
    as_json: bool = JSON_OPTION,
    apply: bool = typer.Option(
        False, "--apply", help="Keep the proposed settings beside the run, for the same train command to pick up."
    ),
) -> None:
    """Say why a run failed, stands still or does not learn, and which setting to change.

    Changes nothing unless --apply is given. Without a name it goes to the run that was started last, on this machine or
    on the current cluster; --here and --cluster NAME say which.
    """
    actions.diagnose.diagnose(run, log, as_json=as_json, apply=apply)
