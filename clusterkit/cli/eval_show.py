"""`clusterkit eval show` and `eval stop`: look at answers; end an evaluation on a cluster."""

from __future__ import annotations

from pathlib import Path

import typer

from clusterkit.cli.target import USER_OPTION, Kind, Typed, checked_user, target, told
from clusterkit.ui import output
from trainer.errors import UserError


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
    from clusterkit.evaluate.answers import find_question, listing, read_row, shown_question  # noqa: PLC0415
    from evaluation.results import find_results, read_results  # noqa: PLC0415

    if cluster is not None:
        from clusterkit.cli.eval_cluster import copy_of, fetch_newest  # noqa: PLC0415

        folder = str(fetch_newest(cluster, folder, copy_of(cluster, folder)))
    try:
        path = find_results(folder)
    except UserError:  # nothing of an evaluation here: those of the current cluster
        path = _of_current(folder)
    row = read_row(read_results(path), path.parent, dataset)
    if question is None:
        if as_json:
            output.result_json([entry.as_dict() for entry in row.entries])
        else:
            output.result(listing(row))
        return
    entry = find_question(row, question, sample)
    if as_json:
        output.result_json(entry.as_dict())
    else:
        output.result(shown_question(row, entry))


def stop(
    cluster: str | None = typer.Option(
        None, "--cluster", metavar="NAME", help="Where it runs; on the current cluster when left out."
    ),
    output_path: str = typer.Option(
        "eval", "--output-path", "--output_path", help="That of the command that started it."
    ),
    user: str | None = USER_OPTION,
) -> None:
    """End your evaluation on a cluster in order, or that of --user; the same command goes on with it.

    One of this machine: Ctrl-C.
    """
    from clusterkit.cli.eval_cluster import stop_on  # noqa: PLC0415

    place = told(target(Kind.ON_A_CLUSTER, Typed(cluster)))
    assert place is not None
    output.result(stop_on(place, output_path, checked_user(user)))


def _of_current(folder: str) -> Path:
    """The latest results of the current cluster, copied here. Raises UserError where there are none."""
    from clusterkit.cli.eval_cluster import copy_of, fetch_newest  # noqa: PLC0415
    from evaluation.results import find_results  # noqa: PLC0415

    place = told(target(Kind.CLUSTER_FIRST))
    return find_results(str(fetch_newest(place, folder, copy_of(place, folder))) if place is not None else folder)
