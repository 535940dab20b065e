"""Getting and grading the answers that an evaluation lacks: everything that needs a model's packages."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from evaluation.config import EvalConfig
from evaluation.engines import Opened, context_window, open_engine
from evaluation.grade import Grader
from evaluation.lengths import fitted_agent
from evaluation.methods import make_reader
from evaluation.plan import Row
from evaluation.progress import say
from evaluation.reader import TooLong
from evaluation.results import too_long_note
from evaluation.runner import Loaded, Runner
from evaluation.steps import weights_stamp
from trainer.agents.template import encode
from trainer.config_agents import MemagentConfig
from trainer.errors import RunError, UserError
from trainer.grading.pool import GradingPool
from trainer.train.adapterfiles import whole_model
from trainer.train.model import load_tokenizer
from trainer.types import Task

SHOWN_PROMPT = 20_000


def ask(
    config: EvalConfig,
    kind: str,
    folder: Path,
    stamp: list[tuple[str, int, int, int]],
    rows: list[Row],
    place: Path,
    stop: Callable[[], bool],
) -> tuple[dict[str, str], float]:
    """Get the answers that rows lack, and grade them.

    Args:
        stamp: of the folder's weights (`weights_stamp`), as rows are named after them.

    Returns:
        Versions of the engine's software, and seconds without loading.

    Raises:
        UserError: a row cannot be asked.
        RunError: the engine does not start, the weights were replaced before it had read them, or answers are missing.
    """
    checkpoint = folder
    folder = whole_model(folder, config.cache_dir)
    tokenizer = load_tokenizer(folder)
    window = context_window(folder, config.server)
    loaded = _load(rows, tokenizer, window)
    missing = sum(len(one.row.record.missing(one.row.keys([t.id for t in one.tasks]))) for one in loaded)

    async def run(grader: Grader) -> tuple[dict[str, str], float]:
        async with open_engine(config, kind, folder, tokenizer, place / "servers", stop) as opened:
            if weights_stamp(checkpoint) != stamp:
                raise RunError(
                    f"{checkpoint} was replaced while it was read: nothing was asked, as the answers would be kept for "
                    "the weights of before. The same command asks those that are there now"
                )
            say(f"engine {kind} is ready: {missing} answers to get")
            for one in loaded:
                _begin(one, opened.versions)
            progress = await Runner(config, opened, grader, stop).run(loaded)
            return opened.versions, progress.seconds

    async def only_grade(grader: Grader) -> tuple[dict[str, str], float]:
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


def fitted_lengths(config: EvalConfig, folder: Path) -> EvalConfig:
    """The configuration with lengths of the agent that the checkpoint's context window has room for; they are told."""
    if not isinstance(config.agent, MemagentConfig):
        return config
    whole = whole_model(folder, config.cache_dir)
    window = context_window(whole, config.server)
    return config.model_copy(update={"agent": fitted_agent(config, config.agent, load_tokenizer(whole), window)})


def _load(rows: list[Row], tokenizer: Any, window: int) -> list[Loaded]:
    tasks: dict[str, list[Task]] = {}  # of a suite, which the rows of all methods share
    loaded = []
    for row in rows:
        if row.suite.name not in tasks:
            tasks[row.suite.name] = row.suite.load(lambda text: len(encode(tokenizer, text)))
        encode(tokenizer, "")  # undoes what its file or a row before has set: threads could not at the same time
        loaded.append(_prepared(row, tasks[row.suite.name], tokenizer, window))
    return loaded


def _prepared(row: Row, tasks: list[Task], tokenizer: Any, window: int) -> Loaded:
    reader = make_reader(row.config, row.method, tokenizer, window, row.suite)
    try:
        prepared = reader.prepare(tasks)
    except UserError as error:
        raise UserError(f"{row.name}: {error}") from error
    if too_long := [one for one in prepared if isinstance(one, TooLong)]:
        if len(too_long) == len(tasks):
            raise UserError(f"{row.name}: all {len(tasks)} questions are too long. The first: {too_long[0].reason}")
        say(too_long_note(row.name, len(too_long), len(tasks), too_long[0].reason))
    return Loaded(row, reader, tasks, prepared)


def _begin(one: Loaded, versions: dict[str, str]) -> None:
    """Describe a row on disk before its first answer."""
    questions = []
    for task, prepared in zip(one.tasks, one.prepared, strict=True):
        line: dict[str, Any] = {"id": task.id, "question": task.question, "answers": list(task.answers)}
        line["meta"] = task.meta
        if one.row.method is None and not isinstance(prepared, TooLong):
            line["prompt"] = one.reader.first_prompt(prepared)
        questions.append(line)
    first = one.reader.first_prompt(next(p for p in one.prepared if not isinstance(p, TooLong)))
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
