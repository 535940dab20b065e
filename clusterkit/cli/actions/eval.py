"""`clusterkit eval`: have a checkpoint scored, and print the table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clusterkit.backends.base import Say
from clusterkit.cli.actions.target import announce, checked_user, hosts_of_cluster, place_of
from clusterkit.cli.actions.target_of_run import for_checkpoint
from clusterkit.cli.runoptions import RunOptions
from clusterkit.evaluate.local import LocalEvaluator
from clusterkit.evaluate.pages import PAGE, write_pages
from clusterkit.evaluate.process import Finished
from clusterkit.evaluate.request import EvalArguments, settings_in_words
from clusterkit.ssh.host_options import HostOptions
from clusterkit.ui import output
from evaluation.config import EvalConfig, WatchConfig
from evaluation.results import RESULTS
from trainer.errors import UserError

if TYPE_CHECKING:
    from clusterkit.evaluate.cluster import ClusterEvaluator


def evaluate(
    typed_arguments: dict[str, Any], typed: RunOptions, *, detach: bool, dry_run: bool, as_json: bool, shown: bool
) -> None:
    """Evaluate where the options say; the exit code is 1 where answers are missing.

    Args:
        typed_arguments: what is evaluated; fields of `EvalArguments`.
        typed: what the options say about the place.
        detach: come back once it is submitted.
        dry_run: print the configuration; ask nothing.
        as_json: print the results as JSON.
        shown: whether progress is shown.
    """
    say: Say = output.note if shown else lambda _: None
    arguments = EvalArguments(**typed_arguments)
    if arguments.watch and arguments.model_path is not None:
        raise UserError("--watch chooses the checkpoints itself: leave --model-path out")
    cluster = announce(for_checkpoint(arguments.watch or arguments.model_path, typed))
    with evaluator_at(cluster, say) as evaluator:
        if dry_run:
            _print_plan(evaluator.plan(arguments), as_json)
            evaluator.require()
            return
        submitted = evaluator.start(arguments, detach=detach)
        if submitted is not None:
            state = "it runs already" if submitted.attached else "it runs"
            output.note(f"{state}, as job {submitted.submission_id}. Folder on the cluster: {submitted.output}")
            if detach:
                if as_json:
                    output.result_json(submitted.as_dict())
                output.note(_how_to_go_on(cluster, arguments.output_path))
                return
        try:
            finished = evaluator.follow(arguments, submitted, lambda folder: _print_scored(folder, as_json))
        except KeyboardInterrupt:
            if submitted is None:
                raise
            on = _how_to_go_on(cluster, arguments.output_path)
            output.note(f"detached: it goes on, as job {submitted.submission_id}\n{on}")
            raise typer.Exit(0) from None
    if finished is not None:
        _print_results(finished, as_json)


def stop(cluster: str | None, output_path: str, user: str | None) -> None:
    """End the evaluation that writes into a folder on a cluster."""
    whose = checked_user(user)
    with cluster_evaluator(hosts_of_cluster(HostOptions(cluster=cluster)), output.note) as evaluator:
        output.result(evaluator.stop(output_path, whose))


@contextmanager
def evaluator_at(cluster: str | None, say: Say) -> Iterator[LocalEvaluator | ClusterEvaluator]:
    """The evaluator of a cluster, or of this machine, for the length of a block."""
    if cluster is None:
        yield LocalEvaluator(say)
        return
    with cluster_evaluator(HostOptions(cluster=cluster), say) as evaluator:
        yield evaluator


@contextmanager
def cluster_evaluator(hosts: HostOptions, say: Say) -> Iterator[ClusterEvaluator]:
    """The evaluator of a cluster for the length of a block."""
    from clusterkit.backends.ray.backend import RayBackend  # noqa: PLC0415 (asyncssh, only for a cluster)
    from clusterkit.evaluate.cluster import ClusterEvaluator  # noqa: PLC0415 (asyncssh, only for a cluster)

    with RayBackend(place_of(hosts), say) as backend:
        yield ClusterEvaluator(backend)


def _how_to_go_on(cluster: str | None, output_path: str) -> str:
    return (
        "  follow it       the same command again, which also copies the results here\n"
        f"  look at answers clusterkit eval show {output_path} --cluster {cluster}, once it has ended\n"
        f"  end it          clusterkit eval stop --cluster {cluster} --output-path {output_path}"
    )


def _print_plan(config: EvalConfig | WatchConfig, as_json: bool) -> None:
    if as_json:
        output.result_json(config.model_dump())
    else:
        output.result("\n".join(f"{key}={value}" for key, value in settings_in_words(config).items()))


def _print_scored(folder: Path, as_json: bool) -> None:
    """Print the table of one checkpoint's results, and draw the curve anew."""
    write_pages(folder)
    if as_json:
        output.line_json(json.loads((folder / RESULTS).read_text(encoding="utf-8")))
    else:
        output.result((folder / "table.txt").read_text(encoding="utf-8").partition("\n\n")[0])
        output.note(f"The curve: {folder.parent / PAGE}")


def _print_results(finished: Finished, as_json: bool) -> None:
    """Write the pages, print the table, and end with code 1 where answers are missing."""
    page = write_pages(finished.folder)
    if as_json:
        output.result_json(finished.results)
    else:
        output.result((finished.folder / "table.txt").read_text(encoding="utf-8"))
        output.note(f"Results: {finished.folder}. Answers that are wrong: {page}")
    if not finished.complete:
        missing = sum(row["missing"] for row in finished.results["rows"])
        output.error(
            f"incomplete: {missing} answers failed and count as wrong here; the same command asks for them again"
        )
        raise typer.Exit(1)
