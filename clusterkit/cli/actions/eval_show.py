"""`clusterkit eval show`: print a question with its answers and verdicts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import Kind, announce, place_of, target
from clusterkit.cli.runoptions import RunOptions
from clusterkit.evaluate.answers import find_question, listing, read_row, shown_question
from clusterkit.evaluate.table import evaluator_of
from clusterkit.ui import output
from evaluation.results import find_results, read_results
from trainer.errors import UserError


def show(
    folder: str, question: str | None, dataset: str | None, sample: str, cluster: str | None, as_json: bool
) -> None:
    """Print one question, or all as a list, of results that are here or are copied here first."""
    path = _results(cluster, folder)
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


def _results(cluster: str | None, folder: str) -> Path:
    """The results that are meant: of the cluster that was named, else those here, else those of the current cluster."""
    if cluster is None:
        with suppress(UserError):
            return find_results(folder)
        cluster = announce(target(Kind.CLUSTER_FIRST, RunOptions()))
    with open_backend(place_of(cluster), output.note) as backend:
        return evaluator_of(backend).results(folder)
