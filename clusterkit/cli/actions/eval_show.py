"""`clusterkit eval show`: print a question with its answers and verdicts."""

from __future__ import annotations

from pathlib import Path

from clusterkit.cli.actions.target import Kind, target, told
from clusterkit.evaluate.answers import find_question, listing, read_row, shown_question
from clusterkit.ui import output
from evaluation.results import find_results, read_results
from trainer.errors import UserError


def show(
    folder: str, question: str | None, dataset: str | None, sample: str, cluster: str | None, as_json: bool
) -> None:
    """Print one question, or all as a list, of results that are here or are copied here first."""
    if cluster is not None:
        folder = str(_fetched(cluster, folder))
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


def _of_current(folder: str) -> Path:
    """The latest results of the current cluster, copied here. Raises UserError where there are none."""
    place = told(target(Kind.CLUSTER_FIRST))
    return find_results(str(_fetched(place, folder)) if place is not None else folder)


def _fetched(cluster: str, folder: str) -> Path:
    from clusterkit.cli.actions import eval_cluster  # noqa: PLC0415 (asyncssh, only for a cluster)

    return eval_cluster.fetch_newest(cluster, folder, eval_cluster.copy_of(cluster, folder))
