"""`clusterkit eval show` and `eval stop`: look at answers; end an evaluation on a cluster."""

from __future__ import annotations

import typer

from clusterkit.cli import actions
from clusterkit.cli.runoptions import RunOptions, takes_run


def show(
    folder: str = typer.Argument("eval", metavar="FOLDER", help="Folder of results, or an output path (its newest)."),
    question: str | None = typer.Option(None, "--question", help="Number (from 1) or id; all as a list when left out."),
    dataset: str | None = typer.Option(None, "--dataset", help="Row of the table; the first when left out."),
    sample: str = typer.Option("", "--sample", help="greedy, or a number from 0; all when left out."),
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="Copy the latest results of FOLDER from this cluster first."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Print a question with its prompt, answers, what was extracted, and the verdicts with their reasons."""
    actions.eval_show.show(folder, question, dataset, sample, cluster, as_json)


@takes_run("cluster", "here", "user")
def stop(
    *,
    run: RunOptions,
    output_path: str = typer.Option(
        "eval", "--output-path", "--output_path", help="That of the command that started it."
    ),
) -> None:
    """End your evaluation on the current cluster in order, or that of --user; the same command goes on with it.

    --here and --cluster NAME say where it runs.
    """
    actions.eval.stop(run, output_path)
