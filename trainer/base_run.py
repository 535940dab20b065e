"""Base of runs that learn: optimizer steps, checkpoints, recovery, interruption, and the statistics of a step."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.checkpoint.background import BackgroundWriter, Record
from trainer.checkpoint.export import BackgroundExport, export, parameter_digest
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.checkpoint.room import CheckpointSizes, remove_torn, room_problem, room_warning
from trainer.checkpoint.start import Start, settings_and_data
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, RunError
from trainer.evaluate import time_split
from trainer.files import write_atomic
from trainer.metrics import Monitor, epoch_line, stats_line, step_scalars
from trainer.paths import RunPaths
from trainer.schedule import Schedule, recover_due, save_due, warning_of_late_save
from trainer.train.distributed import World
from trainer.train.flops import Work, peak_flops
from trainer.train.learner import Learner, StepStats
from trainer.train.parity import require_parity
from trainer.types import Row

RECENT_STEPS = 20


class Clock:
    """Seconds spent in named phases of the present step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a with-block to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Attempt:
    """What one rank's attempt at a run is given.

    model_folder: checkpoint that it starts from, with the tokenizer.
    stop: called at safe points; whether to stop.
    """

    config: RunConfig
    model_folder: Path
    world: World
    monitor: Monitor
    stop: Callable[[], bool]
    start: Start


class SteppedRun(ABC):
    """One attempt at a run of training steps; a subclass calls `SteppedRun.__init__`, then adds its parts."""

    course: Schedule
    learner: Learner
    tokenizer: Any

    def __init__(self, attempt: Attempt) -> None:
        config, world, stop = attempt.config, attempt.world, attempt.stop
        self.config, self.world, self.monitor, self.stop = config, world, attempt.monitor, stop
        self.paths, self.start = RunPaths.of(config), attempt.start
        # No rank may leave the others waiting in a collective: several ranks agree on stopping between phases.
        self.stop_here: Callable[[], bool] = stop if world.size == 1 else lambda: False
        self.writer = BackgroundWriter()
        self.store = RecoverStore(self.paths.recover, self.writer)
        self.state = RunState(global_step=0, next_task=0, optimizer_steps=0, version=0, seconds=0.0)
        self.saved_step = 0
        self.table_lines = 0  # of the closing table, where there is one
        # Rank 0 writes it.
        self.fingerprint = settings_and_data(config, attempt.start.data) if world.is_main else {}
        self.skipped_in_row = 0
        self.longest_row = 0  # tokens of the longest planned row; 0: log-probs are not compared
        chosen = config.checkpoint.async_recover
        self.in_background = world.device.type == "cuda" if chosen is None else chosen
        self.checkpoint_seconds = 0.0  # time that the training waited for checkpoints since the last step's record
        self.last_recover_at = time.monotonic()
        self.recent: list[float] = []
        self.clock = Clock()

    @property
    def global_step(self) -> int:
        """Steps that are done."""
        return self.state.global_step

    @abstractmethod
    def run(self) -> None:
        """Train until the last step. Raises InterruptedRunError when asked to stop; a recover checkpoint is there."""

    @abstractmethod
    def _publish(self, version: int) -> None:
        """Give the learner's weights to the engines that sample; also called after they were loaded."""

    def _optimize(self, minibatches: list[list[Row]], number: int) -> StepStats:
        """All optimizer steps of a training step; returns their averaged numbers.

        Raises:
            RunError: the gradient was not finite for train.max_skipped_steps optimizer steps in a row.
            UserError: as `_check_logprobs`.
        """
        self._check_logprobs()
        results = []
        for position, minibatch in enumerate(minibatches):
            # After the first optimizer step the weights have changed, so the step is always finished.
            abandon = self.stop_here if position == 0 else (lambda: False)
            results.append(self.learner.step(minibatch, abandon))
        skipped = sum(not r.stepped and r.values["trained_tokens"] > 0 for r in results)
        if skipped:
            self.monitor.warn(f"step {number}: the gradient was not finite, {skipped} optimizer step(s) skipped")
        self._count_skipped(results, number)
        keys = {key for r in results for key in r.values}
        totals = {"trained_tokens", "trained_rows", "micro_batches", "masked_tokens"}
        merged = {}
        for key in keys:
            # An optimizer step with nothing to learn from has no ratios or losses.
            values = [r.values[key] for r in results if key in r.values]
            merged[key] = sum(values) / (1 if key in totals else len(values))
        work = sum((r.work for r in results), Work())
        speed = work.numbers(self.world.size, peak_flops(self.world.device))
        return StepStats(merged | speed | {"skipped_steps": float(skipped)}, any(r.stepped for r in results), work)

    def _check_logprobs(self) -> None:
        """Compare the log-probs that are trained on with the model's own, once an attempt; collective.

        Raises:
            UserError: see `require_parity`.
        """
        if self.longest_row and self.config.train.max_logprob_gap != 0:
            found = require_parity(self.learner, self.longest_row, len(self.tokenizer))
            self.monitor.info(f"Log-probs are the model's own: {found}.")
        self.longest_row = 0

    def _rest(self, weights: bool = True) -> None:
        """Offload the learner, where the configuration says so, so that an engine can use the GPU."""
        if self.config.train.offload:
            self.learner.offload(weights)

    def _count_skipped(self, results: list[StepStats], number: int) -> None:
        """Raise RunError after too many skipped optimizer steps in a row."""
        limit = self.config.train.max_skipped_steps
        for result in results:
            if result.values["trained_tokens"] > 0:
                self.skipped_in_row = 0 if result.stepped else self.skipped_in_row + 1
            if limit and self.skipped_in_row >= limit:
                self.writer.wait()  # the checkpoint that is named below is whole
                kept = f"step {self.saved_step}" if self.saved_step else "the beginning"
                raise RunError(
                    f"step {number}: the gradient was not finite for {limit} optimizer steps in a row, so nothing is "
                    f"learned any more. Look at actor_loss, grad_norm and mismatch_kl of the last steps in "
                    f"{self.paths.logs / 'metrics.jsonl'}; lower train.learning_rate or train.grad_clip and go on from "
                    f"the recover checkpoint of {kept} with --recover-from in a new trial (train.max_skipped_steps "
                    "says how many are borne)"
                )

    # -- keeping ----------------------------------------------------------------------------------------------------

    def _checkpoint(self, number: int) -> None:
        began = time.perf_counter()
        if self.in_background and self.world.any(self.writer.failed):
            self.writer.wait()
        c = self.config.checkpoint
        # Clocks differ: ranks agree on what is due by time, or some would wait in a collective.
        unsaved = self.state.seconds - self.state.seconds_saved
        if self.world.any(save_due(c, self.course, number, unsaved)):
            self._save_persistent(self._persistent_folder(number))
            self.state = replace(self.state, seconds_saved=self.state.seconds)
        elif self.in_background and save_due(c, self.course, number + 1, unsaved + self.recent[-1]):
            self.exports.reserve()
        since = time.monotonic() - self.last_recover_at
        due = recover_due(c, number, since, have_one=self.saved_step > 0)
        if self.world.any(due) or number == self.course.total_steps:
            self._save_recover()
        elif self.in_background and (self.saved_step > 0 or recover_due(c, number + 1, since, have_one=False)):
            self.store.reserve(self.learner)
        if number == self.course.total_steps:
            self.writer.wait()  # what could not be written is told before the closing evaluation, not after it
        self.checkpoint_seconds = time.perf_counter() - began

    def _persistent_folder(self, number: int) -> Path:
        at = self.course.position(number)
        # AReaL's name.
        return self.paths.checkpoints / f"epoch{at['epoch']}epochstep{at['epoch_step']}globalstep{number}"

    @cached_property
    def exports(self) -> BackgroundExport:
        """Writes persistent checkpoints in the background."""
        return BackgroundExport(self.learner, self.tokenizer, self.writer)

    def _save_persistent(self, folder: Path) -> None:
        """Write a persistent checkpoint. No recover checkpoint that is saved later is whole before it."""
        step = self.state.global_step
        if self.in_background:
            self.exports.save(folder, lambda record: self._note_persistent(step, record))
        else:
            self._note_persistent(step, export(self.learner, self.tokenizer, folder))

    def _save_recover(self) -> None:
        facts = self.learner, self.state, self.fingerprint, self.world
        if self.in_background:
            self.store.save_in_background(*facts, self._note_recover)
        else:
            self._note_recover(self.store.save(*facts))
        self.saved_step = self.state.global_step
        self.last_recover_at = time.monotonic()

    def _note_persistent(self, global_step: int, record: Record) -> None:
        self.monitor.record("save", global_step=global_step, **record)
        self.monitor.info(f"Model actor saved at {record['path']}. Time consumption: {record['seconds']:.4f} s.")

    def _note_recover(self, record: Record) -> None:
        self.monitor.record("recover", **record)
        self.monitor.info("Dumped recover info to file.")

    def _finish_writing(self) -> None:
        """Wait until nothing is being written; where the run ends for another reason, what could not be is told."""
        if (problem := self.writer.finish()) is not None:
            self.monitor.warn(f"{problem}")

    # -- start, stop, end -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Go on from the recover checkpoint that was chosen, if any."""
        for note in self.start.notes:
            self.monitor.warn(note)
        slot = self.start.slot
        if slot is None:
            # An earlier run of this name may have left its summary.
            if self.world.is_main:
                (self.paths.logs / "summary.json").unlink(missing_ok=True)
            return
        self.store.load(self.learner, slot)
        self.state = slot.state
        # A checkpoint of another run is soon saved as our own: that run may be removed.
        self.saved_step = slot.state.global_step if slot.path.parent == self.paths.recover else 0
        self._publish(slot.state.version)

    def _look_for_room(self) -> None:
        """Warn where the disk will be full before the last step; collective. Raises RunError where it is too full now.

        What time makes due (checkpoint.save_freq_secs) is not counted.
        """
        left = range(self.global_step + 1, self.course.total_steps + 1)
        problem = warning = ""
        if self.world.is_main and left:
            folder, sizes = self.store.folder, CheckpointSizes.of(self.learner)
            saves = sum(save_due(self.config.checkpoint, self.course, number, 0.0) for number in left)
            remove_torn(folder, self.paths.checkpoints)
            problem = room_problem(folder, sizes)
            warning = room_warning(folder, self.paths.checkpoints, sizes, len(left), saves)
        if problem := self.world.broadcast(problem):
            raise RunError(problem)
        if warning:
            self.monitor.warn(warning)

    def _announce(self) -> None:
        self._look_for_room()
        step = self.state.global_step
        kind, total = self.config.trainer.type, self.course.total_steps
        self.monitor.record(
            "attempt", type=kind, resume_step=step, total_steps=total, table_lines=self.table_lines,
            **self.world.facts(),
        )  # fmt: skip
        if step:
            position = self.course.position(step)
            self.monitor.info(
                f"Will recover from: StepInfo(epoch={position['epoch']}, epoch_step={position['epoch_step']}, "
                f"global_step={step})"
            )

    def _agree_to_go_on(self) -> None:
        if self.world.any(self.stop()):
            self._interrupt()

    def _interrupt(self) -> None:
        """Write a recover checkpoint of the last whole step and raise InterruptedRunError."""
        step = self.state.global_step
        if step > self.saved_step:
            self._save_recover()
        self.writer.wait()
        kept = f"a recover checkpoint of step {step} is written" if step else self._kept_before()
        again = " without recover_mode=disabled" if kept and self.config.recover_mode == "disabled" else ""
        kept = kept or "no step was finished yet"
        raise InterruptedRunError(f"interrupted after step {step}: {kept}; the same command{again} goes on from there")

    def _kept_before(self) -> str:
        """What is kept of the run before its first step, in words; empty where that is nothing."""
        return ""

    def _close(self, **facts: Any) -> None:
        """Write the last persistent checkpoint where it is missing, the summary, and the log's last line."""
        self.writer.wait()
        digest = parameter_digest(self.learner)
        folder = self._persistent_folder(self.state.global_step)
        if self.world.any(not folder.is_dir()):
            # total_steps was lowered to a step that is done already, and which was not the last one then.
            self._save_persistent(folder)
            self.writer.wait()
        if not self.world.is_main:
            return
        summary = {
            "status": "completed",
            "experiment_name": self.config.experiment_name,
            "trial_name": self.config.trial_name,
            "global_step": self.state.global_step,
            "seconds": round(self.state.seconds, 3),
            **facts,
            "checkpoint": str(folder),
            "parameter_sha256": digest,
            "time_split": time_split(self.paths.logs),
        }
        write_atomic(self.paths.logs / "summary.json", json.dumps(summary, indent=1))
        self.monitor.info("Experiment Completes! Yeah!!!!!!!!")

    # -- looking ----------------------------------------------------------------------------------------------------

    def _eval_due(self, number: int) -> bool:
        """Whether held-out tasks are evaluated after this step; after the last one the closing table comes anyway."""
        every = self.config.eval.every_steps
        return bool(every) and number % every == 0 and number < self.course.total_steps

    def _report_step(
        self, number: int, numbers: dict[str, float], processed: float, began: float, task_ids: list[str]
    ) -> None:
        """Count the step's time, report its numbers and write the checkpoints that are due.

        Args:
            processed: tokens that went through the model.
            began: start of the step, as time.perf_counter().
        """
        seconds = time.perf_counter() - began
        self.state = replace(self.state, seconds=self.state.seconds + seconds)
        self.recent = [*self.recent[-(RECENT_STEPS - 1) :], seconds]
        numbers = dict(sorted(numbers.items()))
        position = self.course.position(number)
        known = sum(self.clock.seconds.values())
        self.clock.seconds["other"] += max(0.0, seconds - known)
        timings = dict(self.clock.seconds)
        if self.checkpoint_seconds:
            timings["checkpoint"] = self.checkpoint_seconds  # after the step before
        self.checkpoint_seconds = 0.0
        remaining = (self.course.total_steps - number) * sum(self.recent) / len(self.recent)
        self.monitor.info(stats_line(numbers))
        self.monitor.info(
            epoch_line(
                position, round(numbers["n_tokens"]), seconds, self.state.seconds, remaining if number > 2 else None
            )
        )
        record = {
            "step_time_s": round(seconds, 4),
            "tokens_per_s": round(processed / seconds, 1),
            "timings": {name: round(value, 4) for name, value in timings.items()},
            "stats": numbers,
            "machine": self.monitor.usage(),
        }
        self.monitor.record("step", **position, **record, task_ids=task_ids)
        self.monitor.scalars(step_scalars(record), number)
        warning = warning_of_late_save(self.config.checkpoint, self.course, seconds)
        if warning and number == self.config.checkpoint.ckpt_first_step:
            self.monitor.warn(warning)
        with self.clock.phase("checkpoint"):
            self._checkpoint(number)
