"""`clusterkit eval`: have a checkpoint scored, and print the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from clusterkit.cli.actions.target import RUNS, Typed, folder_of_runs, told
from clusterkit.cli.actions.target_of_run import for_checkpoint
from clusterkit.evaluate.pages import write_pages
from clusterkit.evaluate.process import Finished, require_evaluator, run_evaluation
from clusterkit.evaluate.request import (
    choose_checkpoint,
    default_names,
    make_request,
    run_settings,
    settings_in_words,
)
from clusterkit.evaluate.watch import watch_folder
from clusterkit.ui import output
from evaluation.config import EvalConfig, WatchConfig
from trainer.errors import UserError

_CHOOSES_ITSELF = "--watch chooses the checkpoints itself: leave --model-path out"


def evaluate(
    values: dict[str, Any],
    names: list[str],
    *,
    model_path: str | None,
    output_path: str,
    data_path: str,
    cache_dir: str,
    preset: str | None,
    compare: list[str],
    settings: list[str],
    fileroot: str | None,
    watch: str | None,
    once: bool,
    cluster: str | None,
    here: bool,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    shown: bool,
) -> None:
    """Evaluate here or on a cluster, as the options say. values: fields of EvalConfig. names: of the data sets."""
    say = output.note if shown else lambda _: None
    by_itself = cluster is None and (values["server"]["url"] or cache_dir)  # a server or a folder of this machine
    cluster = told(for_checkpoint(watch or model_path, Typed(cluster, here or bool(by_itself), fileroot)))
    if cluster is not None:
        if watch is not None and model_path is not None:
            raise UserError(_CHOOSES_ITSELF)
        from clusterkit.cli.actions import eval_cluster  # noqa: PLC0415 (asyncssh, only for a cluster)
        from clusterkit.evaluate.remote import EvalArguments  # noqa: PLC0415 (asyncssh, only for a cluster)

        words = (model_path, output_path, tuple(names), data_path, preset, tuple(compare), tuple(settings), values)
        wanted = EvalArguments(*words, fileroot or RUNS, watch or "", once)
        if dry_run:
            _print_plan(eval_cluster.planned(cluster, wanted), as_json)
            return
        finished = eval_cluster.evaluate_on(cluster, wanted, detach=detach, as_json=as_json, say=say)
        if finished is not None:
            _print_results(finished, as_json)
        return
    if detach:
        raise UserError("--detach belongs to --cluster: an evaluation of this machine ends with its command")
    values |= {
        "output_path": str(Path(output_path).expanduser().absolute()),
        "data_path": _absolute(data_path),
        "cache_dir": cache_dir,
        "compare": [_absolute(folder) for folder in compare],
    }

    def request(checkpoint: str) -> EvalConfig:
        trained = run_settings(checkpoint, preset)
        asked = [_absolute(n) if "/" in n or n.endswith(".jsonl") else n for n in names] or default_names(trained)
        return make_request({**values, "model_path": checkpoint, "data_names": asked}, trained, settings)

    if watch is not None:
        if model_path is not None:
            raise UserError(_CHOOSES_ITSELF)
        watch_folder(Path(watch).expanduser().absolute(), request, say, once=once, as_json=as_json)
        return
    config = request(choose_checkpoint(model_path, folder_of_runs(fileroot)))
    if dry_run:
        _print_plan(config, as_json)
    require_evaluator()
    if dry_run:
        return
    _print_results(run_evaluation(config, say, output.debug), as_json)


def _print_plan(config: EvalConfig | WatchConfig, as_json: bool) -> None:
    if as_json:
        output.result_json(config.model_dump())
    else:
        output.result("\n".join(f"{key}={value}" for key, value in settings_in_words(config).items()))


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


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""
