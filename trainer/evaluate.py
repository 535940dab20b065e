"""Held-out evaluation by the agent loop on tasks that are never trained on, and the closing table of a run:
the score before and after, at greater lengths, and with the memory blanked.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.agents.ways import gold_paragraphs
from trainer.config import RunConfig
from trainer.config_tasks import FactsConfig, RecallConfig
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.rewards.qa import qa_metrics
from trainer.rollout.controller import SamplingPlan
from trainer.seeding import derive_seed
from trainer.tasks.base import Split, TaskSource
from trainer.types import Group, Task, Trajectory

Roll = Callable[[Sequence[Task], SamplingPlan], list[Group]]


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """What to evaluate on, and how.

    split, num_tasks: the first `num_tasks` tasks of `split`.
    chunks: length of their documents; 0: the training mixture of lengths.
    documents: hotpotqa: documents in their contexts; 0: as held-out contexts have while it trains.
    temperature: 0 is greedy.
    blank_memory, banned_final_ids: see RolloutOptions.
    method: of eval.final_methods, how the documents are read; empty: section after section, with a memory.
    """

    split: Split
    num_tasks: int
    chunks: int = 0
    documents: int = 0
    temperature: float = 0.0
    blank_memory: bool = False
    banned_final_ids: tuple[int, ...] = ()
    method: str = ""

    @property
    def is_mixture(self) -> bool:
        """Whether it is the training mixture, with its memory."""
        return not (self.chunks or self.documents or self.blank_memory or self.method)

    @property
    def line(self) -> dict[str, Any]:
        """Which line of the closing table it is, as records and files say it."""
        return {
            "chunks": self.chunks,
            "documents": self.documents,
            "blank_memory": self.blank_memory,
            "method": self.method,
        }


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Result of an evaluation; failed trajectories count as wrong.

    accuracy: mean reward, or what the reward counts in its place (r1 of a memory); people are told it as the reward's
        `score_name`.
    interval: bounds of its 95 % interval, by the bootstrap over tasks.
    metrics: means of the QA metrics, or of the reward's own.
    sampled_accuracy: accuracy at the training temperature, where it was measured beside the greedy one.
    tasks: hash of the ids of the tasks, so that two results can be told to be of the same ones.
    """

    accuracy: float
    interval: tuple[float, float]
    metrics: dict[str, float]
    num_tasks: int
    num_failed: int
    seconds: float
    sampled_accuracy: float | None = None
    tasks: str = ""

    def record(self) -> dict[str, Any]:
        """Fields of a metrics record."""
        sampled = {} if self.sampled_accuracy is None else {"sampled_accuracy": self.sampled_accuracy}
        return {
            **sampled,
            "num_tasks": self.num_tasks,
            "num_failed": self.num_failed,
            "interval": [round(bound, 6) for bound in self.interval],
            "metrics": self.metrics,
            "seconds": round(self.seconds, 3),
        }


def evaluate(roll: Roll, source: TaskSource, spec: EvalSpec) -> EvalResult:
    """Roll out each held-out task once and average; tasks and seeds are the same in every call.

    Args:
        roll: tasks and how they are sampled -> their groups (`Sampler.groups`, or `RolloutController.run`).

    Raises:
        UserError: the split has no task.
    """
    began = time.perf_counter()
    tasks, plan = heldout_tasks(source, spec)
    groups = roll(tasks, plan)
    return result_of(groups, time.perf_counter() - began)


def heldout_tasks(source: TaskSource, spec: EvalSpec) -> tuple[list[Task], SamplingPlan]:
    """What an evaluation asks, and how it is sampled. Raises UserError where the split has no task."""
    count = min(spec.num_tasks, source.num_heldout(spec.split))
    if not count:
        raise UserError(
            f"no question is held out for eval.split={spec.split}: choose the other split, or hold out more"
        )
    tasks = [source.heldout(spec.split, index, spec.chunks or spec.documents) for index in range(count)]
    plan = SamplingPlan(
        purpose=f"eval-{spec.split}",
        temperature=spec.temperature,
        blank_memory=spec.blank_memory,
        banned_final_ids=spec.banned_final_ids,
        method=spec.method,
    )
    return tasks, plan


def result_of(groups: Sequence[Group], seconds: float) -> EvalResult:
    """Averages of an evaluation's groups, each of one trajectory. seconds: that they took."""
    scores, count = [_score(group.task, group.trajectories[0]) for group in groups], len(groups)
    return EvalResult(
        accuracy=sum(s.accuracy for s in scores) / count,
        interval=bootstrap_interval([s.accuracy for s in scores]),
        metrics=_means(scores),
        num_tasks=count,
        num_failed=sum(s.failed for s in scores),
        seconds=seconds,
        tasks=hashlib.sha256("\n".join(group.task.id for group in groups).encode()).hexdigest()[:16],
    )


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the 95 % interval of the mean: percentiles of the means of BOOTSTRAP_SAMPLES samples of the values."""
    rng, count = random.Random(derive_seed("bootstrap", len(values))), len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(BOOTSTRAP_SAMPLES))
    return means[round(0.025 * (BOOTSTRAP_SAMPLES - 1))], means[round(0.975 * (BOOTSTRAP_SAMPLES - 1))]


@dataclass(frozen=True, slots=True)
class _Score:
    accuracy: float
    metrics: dict[str, float]
    failed: bool


def _score(task: Task, trajectory: Trajectory) -> _Score:
    failed = trajectory.error is not None
    accuracy = trajectory.reward if trajectory.accuracy is None else trajectory.accuracy
    if not task.questions:
        metrics = qa_metrics(trajectory.answer_text, list(task.answers))
        form = task.meta.get("form", "")  # half of the answers yes and no are right by chance
        return _Score(accuracy, metrics | ({f"{form}/f1": metrics["f1"]} if form else {}), failed)
    # Questions that are asked of the memory: the reward has measured, by data source too.
    source = task.meta.get("source", "")
    by_source = {f"{source}/perf": accuracy, f"{source}/mem": trajectory.metrics.get("memory_tokens", 0.0)}
    return _Score(accuracy, {**trajectory.metrics, **(by_source if source else {})}, failed)


def _means(scores: list[_Score]) -> dict[str, float]:
    """Means over all trajectories, a failed one counting as 0; those of a source (SOURCE/NAME) over its own."""
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    means = {}
    for name in names:
        values = [score.metrics[name] for score in scores if name in score.metrics]
        means[name] = sum(values) / (len(values) if "/" in name else len(scores))
    return means


BEFORE = "before.json"
BOOTSTRAP_SAMPLES = 1000


def trained_chunks(config: RunConfig) -> list[int]:
    """Fewest and most chunks of a training document; empty where the task does not choose its lengths."""
    task = config.task
    return [task.min_chunks, task.max_chunks] if isinstance(task, RecallConfig | FactsConfig) else []


def check_lengths(config: RunConfig, source: TaskSource) -> None:
    """Raise UserError where the source cannot have the contexts of the closing table, or does not say what answers."""
    assert config.eval.split != "train"
    count = min(config.eval.num_tasks, source.num_heldout(config.eval.split))
    gold = "gold" in config.eval.final_methods
    for number in [*([0] if gold else []), *config.eval.final_documents]:
        for index in range(count):  # the last of them would be refused when all is trained
            task = source.heldout(config.eval.split, index, number)
            if gold:
                gold_paragraphs(task)


def time_split(folder: Path) -> dict[str, float]:
    """Seconds by phase over all attempts of a run, warm-up and closing measurements included, from its metrics.jsonl.

    Steps that were done twice, because the run went back to a recover checkpoint, count twice: so did the time.
    """
    seconds: dict[str, float] = defaultdict(float)
    with (folder / "metrics.jsonl").open("rb") as file:
        for line in file:
            with suppress(ValueError, TypeError, KeyError):  # torn by a kill, or damaged on the disk
                _add_seconds(seconds, json.loads(line))
    return {name: round(value, 3) for name, value in seconds.items()}


def _add_seconds(seconds: dict[str, float], record: dict[str, Any]) -> None:
    """Add what a record took."""
    if record["kind"] == "step":
        for name, value in record["timings"].items():
            seconds[name] += value
    elif record["kind"] == "warmup":
        name = "supervised" if record.get("phase") == "supervised" else "warmup"
        seconds[name] += record.get("seconds", 0.0)
    elif record["kind"] == "eval" and record["name"] != "heldout":
        seconds["eval"] += record["seconds"]


def table_specs(config: RunConfig, refusal_ids: tuple[int, ...] = ()) -> list[EvalSpec]:
    """Lines of the table: the training mixture, then other lengths, then the mixture with the memory blanked, then
    other ways to read at the mixture's length and the others.

    refusal_ids: tokens that the policy may not answer with where the memory is blanked, so that it must guess.
    """
    split, count = config.eval.split, config.eval.num_tasks
    assert split != "train"  # RunConfig allows it only where nothing is learned
    # A task of the user's own need not know lengths, nor an agent of theirs a memory.
    lengths = [] if "task.name" in config.custom else config.eval.final_chunks
    table = [EvalSpec(split, count, chunks) for chunks in (0, *lengths)]
    documents = config.other_documents
    table += [EvalSpec(split, count, documents=number) for number in documents]
    if config.eval.blank_memory and "agent.name" not in config.custom:
        table.append(EvalSpec(split, count, blank_memory=True, banned_final_ids=refusal_ids))
    for method in config.eval.final_methods:
        table += [EvalSpec(split, count, documents=number, method=method) for number in (0, *documents)]
    return table


def store_before(folder: Path, results: dict[EvalSpec, EvalResult]) -> None:
    """Keep the measurements from before the first step, for a run that is interrupted."""
    rows = [
        {
            **spec.line,
            "accuracy": r.accuracy,
            "interval": r.interval,
            "sampled_accuracy": r.sampled_accuracy,
            "metrics": r.metrics,
            "tasks": r.tasks,
            "seconds": round(r.seconds, 3),
        }
        for spec, r in results.items()
    ]
    write_atomic(folder / BEFORE, json.dumps(rows))


def closing_table(folder: Path, after: dict[EvalSpec, EvalResult]) -> list[dict[str, Any]]:
    """Rows of summary.json. `before` is null where it was not measured, or of other tasks."""
    try:
        stored = json.loads((folder / BEFORE).read_text())
    except (OSError, ValueError):
        stored = []
    before = {_line(row): row for row in stored}
    rows = []
    for spec, result in after.items():
        old = before.get(_line(spec.line), {})
        if old.get("tasks", result.tasks) != result.tasks:
            old = {}
        rows.append(
            {
                **spec.line,
                "before": old.get("accuracy"),
                "after": result.accuracy,
                "interval_before": old.get("interval"),
                "interval_after": result.interval,
                "sampled_before": old.get("sampled_accuracy"),
                "sampled_after": result.sampled_accuracy,
                "metrics_before": old.get("metrics"),
                "metrics_after": result.metrics,
            }
        )
    return rows


def _line(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which line of the table a row is; those of older runs do not say all of it."""
    return row["chunks"], row.get("documents", 0), row["blank_memory"], row.get("method", "")
