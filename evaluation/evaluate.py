"""An evaluation from its configuration to its tables."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from evaluation import table
from evaluation.config import EvalConfig
from evaluation.intervals import compare, f1_by_form, f1_differences
from evaluation.plan import RECORDS, Row, choose_kind, make_rows
from evaluation.progress import say
from evaluation.record import digest, disk_failure, output_lock
from evaluation.results import RESULTS, find_results, note_of_record, read_results, row_results
from evaluation.steps import checkpoint_sha256, keep_scores, told_base, weights_stamp
from trainer.assets import resolve_model
from trainer.entry import quick_imports
from trainer.files import write_atomic
from trainer.machine import commit


def evaluate(config: EvalConfig, stop: Callable[[], bool] = lambda: False) -> Path:
    """Ask, grade and write what is missing; the folder with results.json and the tables.

    With the same inputs as before it answers from the record, without loading any model.

    Raises:
        UserError: with its subclasses for failed and interrupted evaluations; the message is meant for the user.
    """
    output = Path(config.output_path).expanduser().absolute()
    folder = resolve_model(config.model_path, config.cache_dir)
    earlier = [(name, read_results(find_results(name))) for name in config.compare]
    with output_lock(output):
        base = told_base(folder, config.cache_dir)
        stamp = weights_stamp(folder)  # before its hash, which takes a while
        checkpoint = checkpoint_sha256(folder, config.cache_dir)
        kind = choose_kind(config.server)
        rows = make_rows(
            config, checkpoint, kind, (lambda: _asking().fitted_lengths(config, folder)) if config.free_limits else None
        )
        place = output / run_name(config, folder, checkpoint, rows)
        unfinished = [row for row in rows if not row.finished]
        versions: dict[str, str] = {}
        seconds = 0.0
        if unfinished:
            versions, seconds = _asking().ask(config, kind, folder, stamp, unfinished, place, stop)
        else:
            say("every answer is in the record: nothing is asked again")
        results = _results(config, folder, checkpoint, kind, rows) | {"versions": _versions() | versions}
        results["base_model"] = str(base) if base else None
        results["seconds"] = round(seconds, 3)
        results["comparisons"] = [
            c
            for (_, then), name in zip(earlier, _labels(earlier, results), strict=True)
            for c in compare(results, then, name)
        ]
        _write(place, results)
    try:
        keep_scores(results, place)
    except OSError as error:
        say(f"the scores are not kept with the checkpoint's run: {error}")
    return place


def _asking() -> ModuleType:
    with nullcontext() if "evaluation.asking" in sys.modules else quick_imports():
        from evaluation import asking  # noqa: PLC0415 (PyTorch, which answers from the record do without)

    return asking


def run_name(config: EvalConfig, folder: Path, checkpoint: str, rows: list[Row]) -> str:
    """Name of the folder of results: the checkpoint's, and a hash of all that was asked."""
    row_inputs = [[row.record.hash, row.record.verdicts.path.name, row.greedy, row.samples] for row in rows]
    return f"{folder.name}-{digest([checkpoint, row_inputs, config.num_questions])[:8]}"


def _results(config: EvalConfig, folder: Path, checkpoint: str, kind: str, rows: list[Row]) -> dict[str, Any]:
    found = []
    for row in rows:
        questions = row.record.questions or []
        numbers = row_results(row.record, row.name, questions, row.greedy, row.samples)
        numbers |= {"suite": row.suite.name, "method": row.method, "record": f"{RECORDS}/{row.record.folder.name}"}
        numbers["verdicts"] = row.record.verdicts.path.name
        numbers["f1"] = f1_by_form(numbers["questions"])
        too_long = note_of_record(row.record, numbers)
        notes = [*row.suite.notes, *([too_long] if too_long else [])]
        found.append(numbers | {"source": row.suite.source, "inputs": row.record.inputs, "notes": notes})
    complete = bool(found) and all(row["num_questions"] and not row["missing"] for row in found)
    return {
        "status": "complete" if complete else "incomplete",
        "model_path": str(folder),
        "checkpoint_sha256": checkpoint,
        "engine": kind,
        "time": time.time(),
        "config": next((row.config for row in rows if row.method), config).model_dump(),
        "rows": found,
        "differences": f1_differences(found),
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "commit": commit()}
    for package in ("clusterkit", "math-verify", "sympy", "transformers", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _labels(earlier: list[tuple[str, dict[str, Any]]], now: dict[str, Any]) -> list[str]:
    """The names of the other checkpoints; of their results' folders where two checkpoints, or ours too, have one name.

    earlier: what was typed for each, and its results.
    """
    ours, *theirs = (Path(str(one.get("model_path") or "")).name for one in (now, *(then for _, then in earlier)))
    return [
        name if name and name != ours and theirs.count(name) == 1 else _folder_label(typed)
        for name, (typed, _) in zip(theirs, earlier, strict=True)
    ]


def _folder_label(typed: str) -> str:
    place = Path(typed).expanduser().absolute()
    if place.is_file():
        place = place.parent
    return f"{place.parent.name}/{place.name}" if (place / RESULTS).is_file() else place.name


def _write(place: Path, results: dict[str, Any]) -> None:
    rows = results["rows"]
    texts = [table.areal_table(rows), table.detail_table(rows), table.qa_table(rows), table.memory_table(rows)]
    texts += [table.f1_table(rows), table.difference_table(results["differences"])]
    texts.append(table.comparison_table(results["comparisons"]))
    texts += table.too_long_notes(rows)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / "table.txt", "\n\n".join(text for text in texts if text) + "\n")
        write_atomic(place / "table.csv", table.as_csv(rows))
        write_atomic(place / RESULTS, json.dumps(results, ensure_ascii=False, indent=1))
    except OSError as error:
        raise disk_failure(place, error) from error
