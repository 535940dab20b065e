"""Steps, seconds and hours: from the settings, and from what others measured with the same model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterkit import presets
from clusterkit.presets import Measured
from trainer.config import RunConfig


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and where the number comes from."""

    seconds: float
    basis: str


def steps_per_epoch(config: RunConfig) -> int:
    """Whole batches in one pass over the training tasks."""
    return config.task.train_size // config.rollout.batch_size


def total_steps(config: RunConfig) -> int:
    """Training steps in all; batches of tasks where nothing is learned."""
    if config.trainer.type == "null":
        return -(-config.eval.num_tasks // config.rollout.batch_size)
    return config.train.total_steps or config.train.total_epochs * steps_per_epoch(config)


def save_interval(config: RunConfig) -> int:
    """Steps between persistent checkpoints by steps and epochs; the last step is always saved."""
    settings = config.checkpoint
    every = [settings.save_freq_steps, settings.save_freq_epochs * steps_per_epoch(config), total_steps(config)]
    return min(step for step in every if step)


def first_save_seconds(config: RunConfig, step_seconds: float) -> float:
    """Until the first persistent checkpoint: the step that is due, or the first that ends after save_freq_secs."""
    due = save_interval(config) * step_seconds
    after = config.checkpoint.save_freq_secs
    return min(due, math.ceil(after / step_seconds) * step_seconds) if after else due


def saves(config: RunConfig, step_seconds: float | None) -> int:
    """Persistent checkpoints of the whole run."""
    steps, every = total_steps(config), save_interval(config)
    if config.checkpoint.save_freq_secs and step_seconds:
        every = min(every, max(1, math.ceil(config.checkpoint.save_freq_secs / step_seconds)))
    return -(-steps // every)


def step_time(config: RunConfig, task: str, gpus: int) -> StepTime | None:
    """Seconds of a step on so many GPUs, or None where nobody has published any for this model and task.

    Between two published sizes, and beyond them, log(seconds) is a straight line over log(GPUs); with one published
    size twice the GPUs take half the time. Both are proportional to the trajectories of a step.
    """
    points = _points(config, task)
    if not points or not gpus:
        return None
    sources = "; ".join(dict.fromkeys(measured.source for measured, _ in points))
    times = {measured.gpus: measured.step_seconds * factor for measured, factor in points}
    scaled = ", scaled to this batch" if any(factor != 1 for _, factor in points) else ""
    if gpus in times:
        return StepTime(times[gpus], f"measured on {gpus} GPUs{scaled}: {sources}")
    known = ", ".join(str(count) for count in sorted(times))
    return StepTime(_interpolated(times, gpus), f"estimated from {known} GPUs{scaled}: {sources}")


def measured_for(config: RunConfig, task: str) -> Measured | None:
    """How many steps others took to converge with this model and task."""
    return next((measured for measured, _ in _points(config, task) if measured.steps), None)


def _points(config: RunConfig, task: str) -> list[tuple[Measured, float]]:
    found = []
    for name in presets.size_names():
        size = presets.load_size(name)
        if task not in size.measured:
            continue
        values = {key: setting.value for key, setting in presets.collect(size, task).items()}
        if _model(values.get("model.path")) == _model(config.model.path):
            trajectories = values["rollout.batch_size"] * values["rollout.group_size"]
            factor = config.rollout.batch_size * config.rollout.group_size / trajectories
            found.append((size.measured[task], factor))
    return found


def _model(path: str | None) -> str:
    """`org/name` of the hub and /storage/models/name are one model."""
    return (path or "").rstrip("/").rpartition("/")[2].lower()


def _interpolated(times: dict[int, float], gpus: int) -> float:
    counts = sorted(times)
    if len(counts) == 1:
        return times[counts[0]] * counts[0] / gpus
    high = min(max(1, sum(count < gpus for count in counts)), len(counts) - 1)
    a, b = counts[high - 1], counts[high]
    slope = math.log(times[b] / times[a]) / math.log(b / a)
    return times[a] * math.exp(slope * math.log(gpus / a))
