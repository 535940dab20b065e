"""Steps and epochs of a run, and when checkpoints are due. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config import RunConfig
from trainer.config_parts import CheckpointConfig
from trainer.errors import UserError

LONG_WAIT_S = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps of a run. All numbers count from 1, as in AReaL's log lines."""

    steps_per_epoch: int
    total_steps: int
    train_size: int
    batch_size: int

    @classmethod
    def of(cls, config: RunConfig, train_size: int) -> Schedule:
        """Steps from the number of training tasks; the last, incomplete batch of an epoch is left out.

        Raises:
            UserError: the tasks do not fill one batch.
        """
        per_epoch = train_size // config.rollout.batch_size
        if not per_epoch:
            raise UserError(
                f"rollout.batch_size={config.rollout.batch_size} is larger than the number of training tasks, "
                f"{train_size}: lower it to at most that"
            )
        total = config.train.total_steps or per_epoch * config.train.total_epochs
        return cls(per_epoch, total, train_size, config.rollout.batch_size)

    @property
    def epochs(self) -> int:
        """Epochs, the last one perhaps in part."""
        return -(-self.total_steps // self.steps_per_epoch)

    def first_task(self, global_step: int) -> int:
        """Number of the first training task of a step: the data cursor. An epoch starts at a multiple of train_size."""
        epoch, step = divmod(global_step - 1, self.steps_per_epoch)
        return epoch * self.train_size + step * self.batch_size

    def has_task(self, number: int) -> bool:
        """Whether a task belongs to a whole step of its epoch."""
        return number % self.train_size < self.steps_per_epoch * self.batch_size

    def step_of(self, number: int) -> int:
        """The step that a task belongs to where every step takes the next batch_size tasks."""
        epoch, place = divmod(number, self.train_size)
        return epoch * self.steps_per_epoch + place // self.batch_size + 1

    def position(self, global_step: int) -> dict[str, int]:
        """The numbers that name a step."""
        return {
            "epoch": (global_step - 1) // self.steps_per_epoch + 1,
            "epochs": self.epochs,
            "epoch_step": (global_step - 1) % self.steps_per_epoch + 1,
            "steps_per_epoch": self.steps_per_epoch,
            "global_step": global_step,
            "total_steps": self.total_steps,
        }

    def ends_epoch(self, global_step: int) -> bool:
        """Whether a step is the last of its epoch."""
        return global_step % self.steps_per_epoch == 0


def recover_due(c: CheckpointConfig, global_step: int, seconds_since: float, have_one: bool) -> bool:
    """Whether a recover checkpoint is due: after `ckpt_first_step` if there is none yet, then by time and steps."""
    if not have_one and global_step >= c.ckpt_first_step:
        return True
    if c.ckpt_freq_steps and global_step % c.ckpt_freq_steps == 0:
        return True
    return have_one and seconds_since > c.ckpt_freq_secs


def save_due(c: CheckpointConfig, course: Schedule, global_step: int, seconds_since: float) -> bool:
    """Whether a persistent checkpoint is written after this step. The last step always gets one."""
    by_steps = c.save_freq_steps and global_step % c.save_freq_steps == 0
    by_epochs = (
        c.save_freq_epochs
        and course.ends_epoch(global_step)
        and (global_step // course.steps_per_epoch) % c.save_freq_epochs == 0
    )
    by_time = c.save_freq_secs and seconds_since > c.save_freq_secs
    return bool(by_steps or by_epochs or by_time or global_step == course.total_steps)


def seconds_to_first_save(c: CheckpointConfig, course: Schedule, step_seconds: float) -> float:
    """Seconds from the start until the first persistent checkpoint, at this step time."""
    steps = [course.total_steps]
    if c.save_freq_steps:
        steps.append(c.save_freq_steps)
    if c.save_freq_epochs:
        steps.append(c.save_freq_epochs * course.steps_per_epoch)
    first = min(steps) * step_seconds
    return min(first, c.save_freq_secs + step_seconds) if c.save_freq_secs else first


def warning_of_late_save(c: CheckpointConfig, course: Schedule, step_seconds: float) -> str:
    """What to tell the user where the first persistent checkpoint is long in coming at this step time; else ""."""
    wait = seconds_to_first_save(c, course, step_seconds)
    if wait <= LONG_WAIT_S:
        return ""
    return (
        f"at {step_seconds:.0f} s a step the first persistent checkpoint comes after {wait / 3600:.0f} hours; until "
        "then there is only the recover checkpoint: set checkpoint.save_freq_steps or checkpoint.save_freq_secs"
    )
