"""`clusterkit eval show`: print a question with its answers and verdicts."""

from __future__ import annotations

from pathlib import Path

from clusterkit.cli.actions.eval import cluster_evaluator
from clusterkit.cli.actions.target import Kind, announce, target
from clusterkit.cli.runoptions import RunOptions
from clusterkit.evaluate.answers import find_question, listing, read_row, shown_question
from clusterkit.ssh.host_options import HostOptions
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
    cluster = announce(target(Kind.CLUSTER_FIRST, RunOptions()))
    return find_results(str(_fetched(cluster, folder)) if cluster is not None else folder)


def _fetched(cluster: str, folder: str) -> Path:
    with cluster_evaluator(HostOptions(cluster=cluster), output.note) as evaluator:
        return evaluator.fetch_newest(folder)
