"""`clusterkit diagnose`: why a run failed, stands still or does not learn, and what to change."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.options import CLUSTER_OPTION, FILEROOT_OPTION, HERE_OPTION

app = typer.Typer(rich_markup_mode=None, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def diagnose(
    experiment: str | None = typer.Option(None, "--experiment", help="Experiment; the newest run's when left out."),
    trial: str | None = typer.Option(None, "--trial", help="Trial; the newest when left out."),
    fileroot: str | None = FILEROOT_OPTION,
    cluster: str | None = CLUSTER_OPTION,
    here: bool = HERE_OPTION,
    log: str | None = typer.Option(
        None, "--log", metavar="FILE", help="Any log by itself: of AReaL, SGLang, vLLM or Ray; - for stdin."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    apply: bool = typer.Option(
        False, "--apply", help="Keep the proposed settings beside the run, for the same train command to pick up."
    ),
) -> None:
    """Say why a run failed, stands still or does not learn, and which setting to change.

    Changes nothing unless --apply is given. Without a name it goes to the run that was started last, on this machine or
    on the current cluster; --here and --cluster NAME say which.
    """
    actions.diagnose.diagnose(experiment, trial, fileroot, cluster, here, log, as_json=as_json, apply=apply)
