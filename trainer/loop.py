"""The training loop, readable from top to bottom: roll out, learn, publish, look, keep."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from trainer import closing
from trainer.agents.memagent import MemAgent, check_budget, check_window
from trainer.agents.template import encode
from trainer.checkpoint.export import checkpoint_name, export, parameter_digest
from trainer.checkpoint.fingerprint import fingerprint
from trainer.checkpoint.recover import RecoverStore, RunState
from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.errors import InterruptedRunError
from trainer.evaluate import EvalResult, EvalSpec, evaluate
from trainer.files import write_atomic
from trainer.metrics import Monitor, epoch_line, stats_line
from trainer.paths import RunPaths
from trainer.rollout.batch import TrainingBatch, make_batch
from trainer.rollout.controller import RolloutController, RolloutInterruptedError, SamplingPlan
from trainer.rollout.record import write_rollouts
from trainer.schedule import LONG_WAIT_S, Course, recover_due, save_due, seconds_to_first_save
from trainer.tasks import make_source
from trainer.tasks.recall import NO_FACT
from trainer.train.distributed import World
from trainer.train.learner import Learner, StepAbandonedError, StepStats
from trainer.train.logprobs import PolicyModel
from trainer.train.model import context_window, load_lm, load_tokenizer, stop_token_ids
from trainer.types import Group
from trainer.weights.inprocess import refresh, sampling_copy

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


class TrainingRun:
    """One attempt at a run: builds the parts, goes on from a recover checkpoint, trains to the end.

    Args:
        config: the resolved configuration. model_folder: checkpoint that training starts from. world: this rank.
        monitor: where numbers go. stop: asked at safe points whether to stop. start: what to go on from.

    """

    def __init__(
        self,
        config: RunConfig,
        model_folder: Path,
        world: World,
        monitor: Monitor,
        stop: Callable[[], bool],
        start: Start,
    ) -> None:
        self.config, self.world, self.monitor, self.stop = config, world, monitor, stop
        self.paths, self.start = RunPaths.of(config), start
        # A rank must not leave the others waiting in a collective: with several, stopping is agreed on between phases.
        self.stop_here: Callable[[], bool] = stop if world.size == 1 else lambda: False
        self.source = make_source(config)
        self.tokenizer = load_tokenizer(model_folder)
        lm = load_lm(model_folder, config.model).to(world.device)
        self.agent = MemAgent(config.agent, self.tokenizer)
        check_window(self.agent, context_window(lm, config.model))
        check_budget(self.agent, config.train.max_tokens_per_mb)
        self.course = Course.of(config, self.source.train_size)
        self.replica = sampling_copy(lm, world)
        self.reference = PolicyModel(copy.deepcopy(lm)) if config.algorithm.kl_coef > 0 else None
        self.learner = Learner(lm, config, world, self.course.total_steps * config.train.minibatches)
        self.engine = EmbeddedEngine(
            self.replica, stop_token_ids(lm, self.tokenizer), config.rollout.max_batch_tokens, self.stop_here
        )
        self.controller = RolloutController(self.agent, self.engine, config.seed, self.stop_here)
        self.store = RecoverStore(self.paths.recover)
        self.state = RunState(global_step=0, next_task=0, optimizer_steps=0, version=0, seconds=0.0)
        self.saved_step = 0
        self.last_recover_at = time.monotonic()
        self.recent: list[float] = []
        self.clock = Clock()

    @property
    def global_step(self) -> int:
        """Steps that are done."""
        return self.state.global_step

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the last step. Raises InterruptedRunError when asked to stop; a recover checkpoint is there."""
        self._recover()
        self._announce()
        try:
            if self.state.global_step == 0:
                self._evaluate_before()
            if self.state.eval_due:
                self._evaluate_heldout(self.state.global_step)
                self.state = replace(self.state, eval_due=False)
            while self.state.global_step < self.course.total_steps:
                self._step(self.state.global_step + 1)
            self._finish()
        except (RolloutInterruptedError, StepAbandonedError):
            self._interrupt()

    def _step(self, number: int) -> None:
        began = time.perf_counter()
        self.clock = Clock()
        with self.clock.phase("rollout"):
            groups = self._rollout(number)
        self._agree_to_go_on()
        with self.clock.phase("train"):
            batch, stats = self._learn(groups, number)
        with self.clock.phase("publish"):
            refresh(self.replica, self.learner.policy, self.world)
            asyncio.run(self.engine.update_weights(number))
        if self.config.rollout.save_trajectories and self.world.is_main:
            with self.clock.phase("other"):
                path = self.paths.logs / "rollouts" / f"step_{number}.jsonl.zst"
                write_rollouts(path, groups, batch.advantages, self.tokenizer)
        self.state = replace(
            self.state,
            global_step=number,
            next_task=self.course.first_task(number + 1),
            optimizer_steps=self.learner.optimizer_steps,
            version=number,
        )
        self._look_and_keep(number, groups, batch, stats, began)
        self._agree_to_go_on()

    def _rollout(self, number: int) -> list[Group]:
        """This step's groups, on all ranks alike; every rank samples its share of the tasks."""
        c = self.config.rollout
        first = self.state.next_task
        numbers = range(first + self.world.rank, first + c.batch_size, self.world.size)
        plan = SamplingPlan(f"train-{number}", c.group_size, c.temperature)
        mine = self.controller.run([self.source.train(i) for i in numbers], plan)
        shares = self.world.gather(mine)
        return [shares[i % self.world.size][i // self.world.size] for i in range(c.batch_size)]

    def _learn(self, groups: list[Group], number: int) -> tuple[TrainingBatch, StepStats]:
        """All optimizer steps of a training step; returns their averaged numbers."""
        batch = make_batch(groups, self.agent, self.config, number)
        rows = [row for minibatch in batch.minibatches for row in minibatch]
        if rows and self.config.algorithm.old_logprobs == "recompute":
            for row, values in zip(rows, self.learner.logprobs(rows), strict=True):
                row.old_logprobs = values
        if rows and self.reference is not None:
            for row, values in zip(rows, self.learner.logprobs(rows, self.reference), strict=True):
                row.ref_logprobs = values
        results = []
        for position, minibatch in enumerate(batch.minibatches):
            # Weights have moved after the first optimizer step: from there on the step is finished, never given up.
            abandon = self.stop_here if position == 0 else (lambda: False)
            results.append(self.learner.step(minibatch, abandon))
        skipped = sum(not r.stepped and r.values["trained_tokens"] > 0 for r in results)
        if skipped:
            self.monitor.warn(f"step {number}: the gradient was not finite, {skipped} optimizer step(s) skipped")
        keys = {key for r in results for key in r.values}
        totals = {"trained_tokens", "trained_rows", "micro_batches", "masked_tokens"}
        merged = {
            key: sum(r.values.get(key, 0.0) for r in results) / (1 if key in totals else len(results)) for key in keys
        }
        return batch, StepStats(merged | {"skipped_steps": float(skipped)}, any(r.stepped for r in results))

    def _look_and_keep(
        self, number: int, groups: list[Group], batch: TrainingBatch, stats: StepStats, began: float
    ) -> None:
        """Evaluate, checkpoint and report at the end of a step, in that order of cost."""
        every = self.config.eval.every_steps
        if every and number % every == 0 and number < self.course.total_steps:
            with self.clock.phase("eval"):
                try:
                    self._evaluate_heldout(number)
                except RolloutInterruptedError:
                    # The step itself is done: it is reported and kept as any other; the next attempt evaluates it.
                    self.state = replace(self.state, eval_due=True)
        seconds = time.perf_counter() - began
        self.state = replace(self.state, seconds=self.state.seconds + seconds)
        self.recent = [*self.recent[-(RECENT_STEPS - 1) :], seconds]
        numbers = dict(sorted((batch.stats | stats.values).items()))
        processed = numbers["prompt_tokens"] + numbers["sampled_tokens"] + numbers["trained_tokens"]
        self._report_step(number, numbers, processed, seconds, [g.task.id for g in groups])
        with self.clock.phase("checkpoint"):
            self._checkpoint(number)

    def _checkpoint(self, number: int) -> None:
        c = self.config.checkpoint
        # Clocks differ: what goes by time is agreed on, else some ranks would wait in a collective for the others.
        if self.world.any(save_due(c, self.course, number, self.state.seconds - self.state.seconds_saved)):
            self._save_persistent(self._persistent_folder(number))
            self.state = replace(self.state, seconds_saved=self.state.seconds)
        since = time.monotonic() - self.last_recover_at
        due = recover_due(c, number, since, have_one=self.saved_step > 0)
        if self.world.any(due) or number == self.course.total_steps:
            self._save_recover()

    def _persistent_folder(self, number: int) -> Path:
        position = self.course.position(number)
        return self.paths.checkpoints / checkpoint_name(position["epoch"], position["epoch_step"], number)

    def _save_persistent(self, folder: Path) -> None:
        record = export(self.learner, self.tokenizer, folder)
        self.monitor.record("save", global_step=self.state.global_step, **record)
        self.monitor.info(f"Model actor saved at {record['path']}. Time consumption: {record['seconds']:.4f} s.")

    def _save_recover(self) -> None:
        record = self.store.save(self.learner, self.state, fingerprint(self.config), self.world)
        self.saved_step = self.state.global_step
        self.last_recover_at = time.monotonic()
        self.monitor.record("recover", **record)
        self.monitor.info("Dumped recover info to file.")

    # -- start, stop, end -------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Go on from the recover checkpoint that was chosen, if any."""
        for note in self.start.notes:
            self.monitor.warn(note)
        slot = self.start.slot
        if slot is None:
            # An earlier run of this name may have left its closing table; this run has none yet.
            if self.world.is_main:
                (self.paths.logs / "summary.json").unlink(missing_ok=True)
            return
        self.store.load(self.learner, slot)
        self.state = slot.state
        self.saved_step = slot.state.global_step
        refresh(self.replica, self.learner.policy, self.world)
        asyncio.run(self.engine.update_weights(slot.state.version))

    def _announce(self) -> None:
        step = self.state.global_step
        self.monitor.record(
            "attempt",
            pid=os.getpid(),
            ranks=self.world.size,
            threads=torch.get_num_threads(),
            resume_step=step,
            total_steps=self.course.total_steps,
            versions={
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        )
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
        """The state is that of the end of the last whole step: keep it and leave."""
        step = self.state.global_step
        if step > self.saved_step:
            self._save_recover()
        kept = f"a recover checkpoint of step {step} is written" if step else "no step was finished yet"
        again = " without recover_mode=disabled" if step and self.config.recover_mode == "disabled" else ""
        raise InterruptedRunError(f"interrupted after step {step}: {kept}; the same command{again} goes on from there")

    def _finish(self) -> None:
        """Closing table, summary and the end of the log."""
        results = {line: self._measure(line, "after") for line in closing.lines(self.config)}
        digest = parameter_digest(self.learner)
        folder = self._persistent_folder(self.state.global_step)
        if self.world.any(not folder.is_dir()):
            # The run ends where it was not going to: total_steps was lowered to what is done already.
            self._save_persistent(folder)
        if not self.world.is_main:
            return
        summary = {
            "status": "completed",
            "experiment_name": self.config.experiment_name,
            "trial_name": self.config.trial_name,
            "global_step": self.state.global_step,
            "seconds": round(self.state.seconds, 3),
            "num_tasks": next(iter(results.values())).num_tasks,
            "trained_chunks": closing.trained_chunks(self.config),
            "chance": getattr(self.source, "chance", None),
            "table": closing.table(self.paths.logs, results),
            "checkpoint": str(folder),
            "parameter_sha256": digest,
            "time_split": closing.time_split(self.paths.logs),
        }
        write_atomic(self.paths.logs / "summary.json", json.dumps(summary, indent=1))
        self.monitor.info("Experiment Completes! Yeah!!!!!!!!")

    # -- looking ----------------------------------------------------------------------------------------------------

    def _evaluate_before(self) -> None:
        results = {line: self._measure(line, "before") for line in closing.lines(self.config)}
        if self.world.is_main:
            closing.store_before(self.paths.logs, results)

    def _evaluate_heldout(self, number: int) -> None:
        spec = closing.spec(closing.TRAINING_MIXTURE, self.config, ())
        greedy = self._evaluate(spec)
        self._report_eval("heldout", number, closing.TRAINING_MIXTURE, greedy)
        self.monitor.scalars({"eval/accuracy": greedy.accuracy, **_named("eval", greedy.metrics)}, number)

    def _measure(self, line: closing.Line, name: str) -> EvalResult:
        spec = closing.spec(line, self.config, self._refusal_ids())
        result = self._evaluate(spec)
        if line == closing.TRAINING_MIXTURE:
            sampled = self._evaluate(replace(spec, temperature=self.config.rollout.temperature))
            result = replace(result, sampled_accuracy=sampled.accuracy, seconds=result.seconds + sampled.seconds)
        self._report_eval(name, self.state.global_step, line, result)
        return result

    def _evaluate(self, spec: EvalSpec) -> EvalResult:
        return evaluate(self.controller, self.source, spec, self.world)

    def _refusal_ids(self) -> tuple[int, ...]:
        """First tokens with which the policy says that it knows no answer (the tiny model has a word for that)."""
        return tuple(encode(self.tokenizer, NO_FACT)) if self.config.agent.template == "words" else ()

    def _report_eval(self, name: str, number: int, line: closing.Line, result: EvalResult) -> None:
        self.monitor.record(
            "eval",
            global_step=number,
            name=name,
            chunks=line.chunks,
            blank_memory=line.blank_memory,
            accuracy=result.accuracy,
            **result.record(),
        )
        what = f"{line.chunks} chunks" if line.chunks else "training lengths"
        blank = ", memory blanked" if line.blank_memory else ""
        self.monitor.info(
            f"Evaluation {name} ({what}{blank}): accuracy {result.accuracy:.4f} on {result.num_tasks} tasks."
        )

    def _report_step(
        self, number: int, numbers: dict[str, float], processed: float, seconds: float, task_ids: list[str]
    ) -> None:
        position = self.course.position(number)
        known = sum(self.clock.seconds.values())
        self.clock.seconds["other"] += max(0.0, seconds - known)
        remaining = (self.course.total_steps - number) * sum(self.recent) / len(self.recent)
        self.monitor.info(stats_line(numbers))
        self.monitor.info(
            epoch_line(
                position, round(numbers["n_tokens"]), seconds, self.state.seconds, remaining if number > 2 else None
            )
        )
        self.monitor.record(
            "step",
            **position,
            step_time_s=round(seconds, 4),
            tokens_per_s=round(processed / seconds, 1),
            timings={name: round(value, 4) for name, value in self.clock.seconds.items()},
            stats=numbers,
            task_ids=task_ids,
        )
        self.monitor.scalars(numbers | _named("time", dict(self.clock.seconds)), number)
        if number == self.config.checkpoint.ckpt_first_step:
            self._warn_of_late_save(seconds)

    def _warn_of_late_save(self, step_seconds: float) -> None:
        wait = seconds_to_first_save(self.config.checkpoint, self.course, step_seconds)
        if wait > LONG_WAIT_S:
            self.monitor.warn(
                f"at {step_seconds:.0f} s a step the first persistent checkpoint comes after {wait / 3600:.0f} hours; "
                "until then there is only the recover checkpoint: set checkpoint.save_freq_steps or "
                "checkpoint.save_freq_secs"
            )


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
