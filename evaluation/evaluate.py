"""An evaluation from its configuration to its tables."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from evaluation import table
from evaluation.checkpoint import checkpoint_sha256
from evaluation.config import EvalConfig
from evaluation.engines import choose_kind, context_window, open_engine
from evaluation.grade import Grader
from evaluation.methods import make_reader
from evaluation.plan import RECORDS, Row, make_rows
from evaluation.progress import say
from evaluation.record import digest, disk_failure, output_lock
from evaluation.results import RESULTS, compare, find_results, read_results, row_results
from evaluation.runner import Loaded, Runner
from evaluation.steps import keep_scores
from trainer.assets import resolve_model
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.grading.pool import GradingPool

SHOWN_PROMPT = 20_000


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
        checkpoint = checkpoint_sha256(folder, config.cache_dir)
        kind = choose_kind(config.server)
        rows = make_rows(config, checkpoint, kind)
        place = output / run_name(config, folder, checkpoint, rows)
        unfinished = [row for row in rows if not row.finished]
        versions: dict[str, str] = {}
        seconds = 0.0
        if unfinished:
            versions, seconds = _ask(config, kind, folder, unfinished, place, stop)
        else:
            say("every answer is in the record: nothing is asked again")
        results = _results(config, folder, checkpoint, kind, rows) | {"versions": _versions() | versions}
        results["seconds"] = round(seconds, 3)
        results["comparisons"] = [c for name, then in earlier for c in compare(results, then, _label(name, then))]
        _write(place, results)
    try:
        keep_scores(results, place)
    except OSError as error:
        say(f"the scores are not kept with the checkpoint's run: {error}")
    return place


def run_name(config: EvalConfig, folder: Path, checkpoint: str, rows: list[Row]) -> str:
    """Name of the folder of results: the checkpoint's, and a hash of all that was asked."""
    asked = [[row.record.hash, row.record.verdicts.path.name, row.greedy, row.samples] for row in rows]
    return f"{folder.name}-{digest([checkpoint, asked, config.num_questions])[:8]}"


def _ask(
    config: EvalConfig, kind: str, folder: Path, rows: list[Row], place: Path, stop: Callable[[], bool]
) -> tuple[dict[str, str], float]:
    """Versions of what answered, and seconds that it took, without loading."""
    from trainer.train.model import load_tokenizer  # noqa: PLC0415 (seconds of imports, after the cheap checks)

    tokenizer = load_tokenizer(folder)
    window = context_window(folder, config.server)
    loaded = [_load(config, row, tokenizer, window) for row in rows]
    missing = sum(len(one.row.record.missing(one.row.keys([t.id for t in one.tasks]))) for one in loaded)

    async def run(grader: Grader) -> tuple[dict[str, str], float]:
        async with open_engine(config, kind, folder, tokenizer, place / "servers", stop) as opened:
            say(f"engine {kind} is ready: {missing} answers to get")
            for one in loaded:
                _begin(one, opened.versions)
            progress = await Runner(config, opened, grader, stop).run(loaded)
            return opened.versions, progress.seconds

    async def only_grade(grader: Grader) -> tuple[dict[str, str], float]:
        from evaluation.engines import Opened  # noqa: PLC0415

        say("every answer is there already; grading")
        progress = await Runner(config, Opened(None, 1, {}), grader, stop).run(loaded)  # type: ignore[arg-type]
        return {}, progress.seconds

    with ExitStack() as stack:
        pool = None
        if any(row.suite.grading == "math" for row in rows):
            workers = config.grading_workers or max((os.cpu_count() or 2) // 2, 1)
            pool = stack.enter_context(GradingPool(workers, config.grading_seconds, config.percent_lenient))
        grader = Grader(config, pool)
        return asyncio.run(run(grader) if missing else only_grade(grader))


def _load(config: EvalConfig, row: Row, tokenizer: Any, window: int) -> Loaded:
    tasks = row.suite.load(lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    reader = make_reader(config, row.method, tokenizer, window, row.suite)
    try:
        prepared = reader.prepare(tasks)
    except UserError as error:
        raise UserError(f"{row.name}: {error}") from error
    return Loaded(row, reader, tasks, prepared)


def _begin(one: Loaded, versions: dict[str, str]) -> None:
    """Describe a row on disk before its first answer."""
    questions = []
    for task, prepared in zip(one.tasks, one.prepared, strict=True):
        line: dict[str, Any] = {"id": task.id, "question": task.question, "answers": list(task.answers)}
        line["meta"] = task.meta
        if one.row.method is None:
            line["prompt"] = one.reader.first_prompt(prepared)
        questions.append(line)
    first = one.reader.first_prompt(one.prepared[0])
    details = {
        "name": one.row.name,
        "source": one.row.suite.source,
        "notes": list(one.row.suite.notes),
        "first_prompt": first
        if len(first) <= SHOWN_PROMPT
        else first[: SHOWN_PROMPT // 2] + " … " + first[-SHOWN_PROMPT // 2 :],
        "versions": versions,
    }
    one.row.record.begin(details, questions)


def _results(config: EvalConfig, folder: Path, checkpoint: str, kind: str, rows: list[Row]) -> dict[str, Any]:
    found = []
    for row in rows:
        questions = row.record.questions or []
        numbers = row_results(row.record, row.name, questions, row.greedy, row.samples)
        numbers |= {"suite": row.suite.name, "method": row.method, "record": f"{RECORDS}/{row.record.folder.name}"}
        numbers["verdicts"] = row.record.verdicts.path.name
        found.append(
            numbers | {"source": row.suite.source, "inputs": row.record.inputs, "notes": list(row.suite.notes)}
        )
    complete = bool(found) and all(row["num_questions"] and not row["missing"] for row in found)
    return {
        "status": "complete" if complete else "incomplete",
        "model_path": str(folder),
        "checkpoint_sha256": checkpoint,
        "engine": kind,
        "time": time.time(),
        "config": config.model_dump(),
        "rows": found,
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "commit": _commit()}
    for package in ("clusterkit", "math-verify", "sympy", "transformers", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _commit() -> str:
    """The commit of this code, with + where files were changed; empty outside a clone."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _label(name: str, results: dict[str, Any]) -> str:
    return Path(str(results.get("model_path") or name)).name


def _write(place: Path, results: dict[str, Any]) -> None:
    rows = results["rows"]
    texts = [table.areal_table(rows), table.detail_table(rows), table.qa_table(rows), table.memory_table(rows)]
    texts.append(table.comparison_table(results["comparisons"]))
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / "table.txt", "\n\n".join(text for text in texts if text) + "\n")
        write_atomic(place / "table.csv", table.as_csv(rows))
        write_atomic(place / RESULTS, json.dumps(results, ensure_ascii=False, indent=1))
    except OSError as error:
        raise disk_failure(place, error) from error
