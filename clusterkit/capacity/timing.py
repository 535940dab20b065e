"""Steps, seconds and hours of a run, from its settings and from published measurements of the same model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clusterkit.config import presets
from clusterkit.config.presets import Measured
from trainer.config import RunConfig, flatten
from trainer.schedule import Schedule
from trainer.tasks.size import evaluated_tasks, training_size


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, and where the number comes from."""

    seconds: float
    basis: str


def schedule(config: RunConfig) -> Schedule:
    """Return the run's schedule for its number of training tasks. Raises UserError: the tasks do not fill one batch."""
    return Schedule.of(config, training_size(config).tasks)


def steps_per_epoch(config: RunConfig) -> int:
    """Return the whole batches of one pass over the training tasks."""
    if config.trainer.type == "null":  # its last batch may be smaller
        return training_size(config).tasks // config.rollout.batch_size
    return schedule(config).steps_per_epoch


def total_steps(config: RunConfig) -> int:
    """Return the training steps of the run; with trainer.type=null the batches of tasks."""
    if config.trainer.type == "null":
        return max(1, -(-evaluated_tasks(config).tasks // config.rollout.batch_size))
    return schedule(config).total_steps


def save_interval(config: RunConfig) -> int:
    """Return the steps between persistent checkpoints, by steps and epochs; the last step is always saved."""
    settings = config.checkpoint
    every = [settings.save_freq_steps, settings.save_freq_epochs * steps_per_epoch(config), total_steps(config)]
    return min(step for step in every if step)


def first_save_seconds(config: RunConfig, step_seconds: float) -> float:
    """Return the seconds to the first persistent checkpoint: of the due step, or the first after save_freq_secs."""
    due = save_interval(config) * step_seconds
    after = config.checkpoint.save_freq_secs
    return min(due, math.ceil(after / step_seconds) * step_seconds) if after else due


def saves(config: RunConfig, step_seconds: float | None) -> int:
    """Return the number of persistent checkpoints of the run, that of its supervised start included."""
    steps, every = total_steps(config), save_interval(config)
    if config.checkpoint.save_freq_secs and step_seconds:
        every = min(every, max(1, math.ceil(config.checkpoint.save_freq_secs / step_seconds)))
    return -(-steps // every) + bool(config.supervised.dataset)


def step_time(config: RunConfig, task: str, gpus: int, gpu_memory_gib: float | None = None) -> StepTime | None:
    """Estimate the seconds of a step; None if nothing is published for this model and task.

    Between two published numbers of GPUs, and beyond them, log(seconds) is linear in log(GPUs). With only one, twice
    the GPUs take half the time. Seconds are proportional to the trajectories of a step.

    Args:
        gpu_memory_gib: of one GPU, as typed; None: as the preset's. GPUs of another size are other GPUs.
    """
    points = _points(config, task)
    if not points or not gpus:
        return None
    sources = "; ".join(dict.fromkeys(point.measured.source for point in points))
    times = {point.measured.gpus: point.measured.step_seconds * point.factor for point in points}
    here = next((point for point in points if point.measured.gpus == gpus), None)
    seconds = times[gpus] if here else _interpolated(times, gpus)
    kinds = " and ".join(dict.fromkeys(point.measured.gpu for point in points if point.measured.gpu))
    differs = [
        "another batch" if any(point.factor != 1 for point in points) else "",
        f"another {', '.join(here.changed)}, which it is not corrected for" if here and here.changed else "",
        "all weights" if config.model.lora.rank else "",
        f"GPUs of {points[0].memory_gib:g} GB" if gpu_memory_gib not in (None, points[0].memory_gib) else "",
    ]
    difference = "; ".join(filter(None, differs))
    if here and not difference:
        return StepTime(seconds, f"measured on {_gpus(str(gpus), kinds)}: {sources}")
    known = _gpus(str(gpus) if here else ", ".join(str(count) for count in sorted(times)), kinds)
    return StepTime(seconds, f"estimated from {known}{f' with {difference}' if difference else ''}: {sources}")


def measured_for(config: RunConfig, task: str) -> Measured | None:
    """Return a measurement with the steps to convergence of this model and task, if published; for all weights."""
    if config.model.lora.rank:
        return None
    return next((point.measured for point in _points(config, task) if point.measured.steps), None)


@dataclass(frozen=True)
class _Point:
    """A published step time."""

    measured: Measured
    factor: float  # our trajectories per step over the published ones
    memory_gib: float
    changed: tuple[str, ...]  # settings that change the speed and differ from ours


_SPEED = ("agent.", "allocation_mode", "model.dtype", "rollout.max_", "task.num_documents")
"""Settings, beside the batch, that change the time of a step."""


def _points(config: RunConfig, task: str) -> list[_Point]:
    found, ours = [], flatten(config)
    for name in presets.size_names():
        size = presets.load_size(name)
        if task not in size.measured:
            continue
        values = {key: setting.value for key, setting in presets.collect(size, task).items()}
        if _model(values.get("model.path")) == _model(config.model.path):
            trajectories = values["rollout.batch_size"] * values["rollout.group_size"]
            factor = config.rollout.batch_size * config.rollout.group_size / trajectories
            changed = tuple(key for key in values if key.startswith(_SPEED) and values[key] != ours.get(key))
            found.append(_Point(size.measured[task], factor, size.gpu_memory_gib, changed))
    return found


def _gpus(counts: str, kind: str) -> str:
    return f"{counts} {kind} GPUs" if kind else f"{counts} GPUs of a kind that was not told"


def _model(path: str | None) -> str:
    """Return the last part of a path, so that `org/name` of the hub and /storage/models/name are one model."""
    return (path or "").rstrip("/").rpartition("/")[2].lower()


def _interpolated(times: dict[int, float], gpus: int) -> float:
    counts = sorted(times)
    if len(counts) == 1:
        return times[counts[0]] * counts[0] / gpus
    high = min(max(1, sum(count < gpus for count in counts)), len(counts) - 1)
    a, b = counts[high - 1], counts[high]
    slope = math.log(times[b] / times[a]) / math.log(b / a)
    return times[a] * math.exp(slope * math.log(gpus / a))
