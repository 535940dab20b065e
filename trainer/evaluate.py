"""Held-out evaluation: the same agent loop on tasks that are never trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.rewards.qa import qa_metrics
from trainer.rollout.controller import SamplingPlan
from trainer.tasks.base import Split, TaskSource
from trainer.types import Group, Task, Trajectory

Roll = Callable[[Sequence[Task], SamplingPlan], list[Group]]


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """What to evaluate on: `num_tasks` tasks of `split`; chunks 0 is the training mixture of lengths."""

    split: Split
    num_tasks: int
    chunks: int = 0
    temperature: float = 0.0
    blank_memory: bool = False
    banned_final_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvalResult:
    """accuracy: mean reward, or what the reward counts in its place (r1 of a memory). metrics: means of the QA metrics,
    or of the reward's own. Failed trajectories count as wrong.
    sampled_accuracy: the same at the training temperature, where it was measured beside the greedy one.
    """

    accuracy: float
    metrics: dict[str, float]
    num_tasks: int
    num_failed: int
    seconds: float
    sampled_accuracy: float | None = None

    def record(self) -> dict[str, Any]:
        """Fields of a metrics record."""
        sampled = {} if self.sampled_accuracy is None else {"sampled_accuracy": self.sampled_accuracy}
        return {
            **sampled,
            "num_tasks": self.num_tasks,
            "num_failed": self.num_failed,
            "metrics": self.metrics,
            "seconds": round(self.seconds, 3),
        }


def evaluate(roll: Roll, source: TaskSource, spec: EvalSpec) -> EvalResult:
    """Roll out each held-out task once and average; the same tasks and seeds every time it is called.

    roll: tasks and how they are sampled -> their groups (`Sampler.groups`, or `RolloutController.run` of one process).

    Raises:
        UserError: the split has no task.

    """
    began = time.perf_counter()
    count = min(spec.num_tasks, source.num_heldout(spec.split))
    if not count:
        raise UserError(
            f"no question is held out for eval.split={spec.split}: choose the other split, or hold out more"
        )
    tasks = [source.heldout(spec.split, index, spec.chunks) for index in range(count)]
    plan = SamplingPlan(
        purpose=f"eval-{spec.split}",
        temperature=spec.temperature,
        blank_memory=spec.blank_memory,
        banned_final_ids=spec.banned_final_ids,
    )
    scores = [_score(task, group.trajectories[0]) for task, group in zip(tasks, roll(tasks, plan), strict=True)]
    return EvalResult(
        accuracy=sum(s.accuracy for s in scores) / count,
        metrics=_means(scores),
        num_tasks=count,
        num_failed=sum(s.failed for s in scores),
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, slots=True)
class _Score:
    accuracy: float
    metrics: dict[str, float]
    failed: bool


def _score(task: Task, trajectory: Trajectory) -> _Score:
    failed = trajectory.error is not None
    accuracy = trajectory.reward if trajectory.accuracy is None else trajectory.accuracy
    if not task.questions:
        return _Score(accuracy, qa_metrics(trajectory.answer_text, list(task.answers)), failed)
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
