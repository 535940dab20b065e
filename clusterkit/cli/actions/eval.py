"""`clusterkit eval`: have a checkpoint scored and print the table; print a question with its answers and verdicts."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from clusterkit.backends.base import Say
from clusterkit.backends.table import open_backend
from clusterkit.cli.actions.target import Kind, announce, checked_user, place_of, slurm_place, target
from clusterkit.cli.actions.target_of_run import for_checkpoint
from clusterkit.cli.runoptions import RunOptions
from clusterkit.evaluate.answers import find_question, listing, read_row, shown_question
from clusterkit.evaluate.pages import PAGE, write_pages
from clusterkit.evaluate.process import Finished
from clusterkit.evaluate.request import EvalArguments
from clusterkit.evaluate.table import evaluator_of
from clusterkit.ui import output
from clusterkit.ui.width import terminal_width
from evaluation.config import EvalConfig, WatchConfig
from evaluation.results import RESULTS, find_results, read_results
from evaluation.table import PIPED, comparison_table, piped_rows, split_wide, too_long_notes
from trainer.config import flatten
from trainer.errors import UserError


def evaluate(
    typed_arguments: dict[str, Any],
    typed: RunOptions,
    *,
    slurm: bool,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Evaluate where the options say; the exit code is 1 where answers are missing.

    Args:
        typed_arguments: what is evaluated; fields of `EvalArguments`.
    """
    say: Say = output.note if shown else lambda _: None
    arguments = EvalArguments(**typed_arguments)
    if arguments.watch and arguments.model_path is not None:
        raise UserError("--watch-dir chooses the checkpoints itself: leave --model-path out")
    if slurm:
        place = slurm_place(typed.cluster is not None, typed.here)
    else:
        place = place_of(announce(for_checkpoint(arguments.watch or arguments.model_path, typed)))
    with open_backend(place, say) as backend:
        evaluator = evaluator_of(backend)
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
                output.note(_how_to_go_on(submitted.place, arguments.output_path))
                return
            output.note("it goes on without this command; Ctrl-C only stops following it")
        try:
            finished = evaluator.follow(arguments, submitted, ScoredPrinter(as_json))
        except KeyboardInterrupt:
            if submitted is None:
                raise
            on = _how_to_go_on(submitted.place, arguments.output_path)
            output.note(f"detached: it goes on, as job {submitted.submission_id}\n{on}")
            raise typer.Exit(0) from None
    if finished is not None:
        _print_results(finished, as_json)


def stop(typed: RunOptions, output_path: str, *, as_json: bool) -> None:
    """End the evaluation that writes into a folder."""
    whose = checked_user(typed.user)
    with open_backend(place_of(announce(target(Kind.ON_A_CLUSTER, typed))), output.note) as backend:
        message = evaluator_of(backend).stop(output_path, whose)
    output.outcome(message, {"out": output_path, "message": message}, as_json=as_json)


def _how_to_go_on(place: str, output_path: str) -> str:
    return (
        "  follow it       the same command again, which also copies the results here\n"
        f"  look at answers clusterkit eval show {output_path} {place}, once it has ended\n"
        f"  end it          clusterkit eval stop {place} --out {output_path}"
    )


def _print_plan(config: EvalConfig | WatchConfig, as_json: bool) -> None:
    text = "\n".join(f"{key}={value}" for key, value in flatten(config).items())
    output.outcome(text, config.model_dump(), as_json=as_json)


class ScoredPrinter:
    """Prints the table of each checkpoint that is scored, and draws the curve anew."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._first = as_json, True

    def __call__(self, folder: Path) -> None:
        """Print the results of this folder."""
        write_pages(folder)
        results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        output.notes(too_long_notes(results["rows"]))
        if self._as_json:
            output.line_json(results)
            return
        if (width := terminal_width()) is None:
            _print_rows(results, header=self._first)
        else:
            first = (folder / "table.txt").read_text(encoding="utf-8").partition("\n\n")[0]
            output.result(split_wide(first, width))
        self._first = False
        output.note(f"The curve: {folder.parent / PAGE}")


def _print_rows(results: dict[str, Any], *, header: bool = True) -> None:
    """Print the rows for a pipe."""
    output.exact("\n".join([*(["\t".join(PIPED)] if header else []), *piped_rows(results)]))


def _print_results(finished: Finished, as_json: bool) -> None:
    """Write the pages, print the table, and end with code 1 where answers are missing."""
    page = write_pages(finished.folder)
    if as_json:
        output.notes(too_long_notes(finished.results["rows"]))
        output.result_json(finished.results)
    else:
        if (width := terminal_width()) is None:
            output.notes(too_long_notes(finished.results["rows"]))
            _print_rows(finished.results)
            if compared := comparison_table(finished.results["comparisons"]):
                output.note(compared)
        else:
            output.result(split_wide((finished.folder / "table.txt").read_text(encoding="utf-8"), width))
        output.note(f"Results: {finished.folder}. Answers that are wrong: {page}")
        output.advice(["Next:", f"  look at answers  clusterkit eval show {shlex.quote(str(finished.folder))}"])
    if not finished.complete:
        missing = sum(row["missing"] for row in finished.results["rows"])
        output.error(
            f"incomplete: {missing} answers failed and count as wrong here; the same command asks for them again"
        )
        raise typer.Exit(1)


def show(
    folder: str, question: str | None, dataset: str | None, sample: str, cluster: str | None, as_json: bool
) -> None:
    """Print one question, or all as a list, of results that are here or are copied here first."""
    path = _results(cluster, folder)
    row = read_row(read_results(path), path.parent, dataset)
    if question is None:
        output.outcome(lambda: listing(row), [entry.as_dict() for entry in row.entries], as_json=as_json)
        return
    entry = find_question(row, question, sample)
    output.outcome(lambda: shown_question(row, entry), entry.as_dict(), as_json=as_json)


def _results(cluster: str | None, folder: str) -> Path:
    """The results that are meant: of the cluster that was named, else those here, else those of the current cluster."""
    if cluster is None:
        with suppress(UserError):
            return find_results(folder)
        cluster = announce(target(Kind.CLUSTER_FIRST, RunOptions()))
    with open_backend(place_of(cluster), output.note) as backend:
        return evaluator_of(backend).results(folder)
