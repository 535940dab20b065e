"""Runs by `trainer.type`: their loop, where they start, and whether they are complete."""

from __future__ import annotations

from trainer import custom
from trainer.base_run import Attempt
from trainer.checkpoint.slots import Slots
from trainer.checkpoint.start import Start, completed_step, find_start
from trainer.config import RunConfig
from trainer.generate_only import RolloutRun, find_rollouts, number_of_tasks
from trainer.loop import TrainingRun
from trainer.paths import RunPaths
from trainer.schedule import Schedule
from trainer.sft.loop import SftRun
from trainer.sft.start import find_supervised, is_start
from trainer.sft.start_run import StartRun
from trainer.tasks import make_source
from trainer.tasks.examples import load_examples

AnyRun = TrainingRun | SftRun | RolloutRun
_TYPES: dict[str, type[AnyRun]] = {"grpo": TrainingRun, "sft": SftRun, "null": RolloutRun}


def make_run(attempt: Attempt) -> AnyRun:
    """One rank's attempt at the run. Raises UserError for settings, classes or data that cannot be used."""
    kind = StartRun if is_start(attempt.config) else _TYPES[attempt.config.trainer.type]
    return kind(attempt)


def begin(config: RunConfig, paths: RunPaths) -> Start:
    """What the run goes on from; changes nothing on disk.

    Raises:
        UserError: a class of the user's cannot be used, or what is there does not fit the settings.
    """
    custom.check(config)
    if config.trainer.type == "null":
        return find_rollouts(config, paths)
    metrics = paths.logs / "metrics.jsonl"
    if not config.supervised.dataset:
        return find_start(config, paths.recover, metrics)
    # What recover_mode=resume asks for may be a recover checkpoint of the supervised start.
    early = config.recover_mode == "resume" and not Slots(paths.recover).occupied()
    start = Start(None) if early else find_start(config, paths.recover, metrics)
    find_supervised(config, goes_on=start.slot is not None)
    return start


def is_complete(config: RunConfig, paths: RunPaths, start: Start) -> bool:
    """Whether an earlier attempt has reached the end that is asked for."""
    done = start.global_step
    if not done or completed_step(paths.logs) != done:
        return False
    if config.trainer.type == "null":
        return start.next_task >= number_of_tasks(config, make_source(config))
    return done >= (config.train.total_steps or Schedule.of(config, train_size(config)).total_steps)


def train_size(config: RunConfig) -> int:
    """Tasks or examples of one epoch."""
    return len(load_examples(config.examples).train) if config.trainer.type == "sft" else make_source(config).train_size
