"""The training loop, readable from top to bottom: roll out, learn, publish, evaluate, save."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from torch import nn

from trainer.agents import make_agent
from trainer.agents.base import check_window
from trainer.agents.template import encode
from trainer.agents.ways import make_ways
from trainer.base_run import Attempt, Clock, SteppedRun
from trainer.config_parts import METHOD_LABELS
from trainer.errors import UserError
from trainer.evaluate import (
    EvalResult,
    EvalSpec,
    check_lengths,
    closing_table,
    evaluate,
    heldout_tasks,
    result_of,
    store_before,
    table_specs,
    trained_chunks,
)
from trainer.heldout import AFTER, BEFORE, HeldoutTrajectories
from trainer.measured import MeasuredLines
from trainer.metrics import eval_scalars
from trainer.placement import gives_memory_away
from trainer.rewards import reward_counts
from trainer.rewards.make import make_reward
from trainer.rollout.batch import RewardMetrics, TrainingBatch, leave_out_rejected, make_batch
from trainer.rollout.controller import RolloutInterruptedError
from trainer.rollout.record import room_warning, write_rollouts
from trainer.rollout.sampler import Sampler
from trainer.rollout.samplers import SamplerParts, embedded_sampler, served_sampler
from trainer.schedule import Schedule
from trainer.start_mark import start_facts, summary_facts
from trainer.tasks import leave_out_misfits, make_source
from trainer.tasks.recall import NO_FACT
from trainer.train.gpu_footprint import require_row_room
from trainer.train.learner import Learner, StepAbandonedError, StepStats
from trainer.train.loading import Origin
from trainer.train.lora import BasePolicy
from trainer.train.model import context_window, load_tokenizer, stop_token_ids
from trainer.types import Group

IDLE_STEPS = 20
"""So many steps in a row without anything to learn from are told."""
ROOM_STEPS = 10
"""After every so many steps it is looked whether the disk has room for the trajectories of all to come."""


class TrainingRun(SteppedRun):
    """One attempt at a run: builds the parts, goes on from a recover checkpoint, trains to the end."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        config, model_folder, world = attempt.config, attempt.model_folder, attempt.world
        self.source = make_source(config)
        self.tokenizer = load_tokenizer(model_folder)
        origin = Origin(model_folder, config, world)
        agent = make_agent(config, self.tokenizer)
        if told := leave_out_misfits(self.source, agent):
            self.monitor.warn(told)
        self.idle_in_row, self.told_room = 0, False
        self.reward_metrics = RewardMetrics(self.monitor.warn)
        self.evaluates = self._holds_out()
        self.table_lines = len(table_specs(config)) if self.evaluates else 0
        kept = config.eval.save_trajectories if world.is_main else 0
        self.heldout = HeldoutTrajectories(self.paths.logs, kept, agent, self.tokenizer)
        self.measured = MeasuredLines(self.paths.logs, config)
        window = context_window(origin.lm, config.model)
        check_window(agent, window, config.train.max_tokens_per_mb)
        packed = config.train.max_tokens_per_mb
        self.longest_row = min(agent.longest_conversation() or packed, window)
        room = max(self.longest_row, min(packed, window))  # a row that is longer than a micro-batch is alone
        require_row_room(origin.lm, config, world, self.longest_row)
        self.reward = make_reward(config, self.tokenizer)
        self.course = Schedule.of(config, self.source.train_size)
        replica = origin.replica() if config.engine == "embedded" else None
        keeps = config.algorithm.kl_coef > 0
        reference = origin.reference() if keeps and not config.model.lora.rank else None
        stop_ids = stop_token_ids(origin.lm, self.tokenizer)
        steps = self.course.total_steps * config.train.minibatches
        self.learner = Learner(origin.lm, config, world, steps, origin.weights)
        self.reference: nn.Module | None = reference
        if keeps and reference is None:
            self.reference = BasePolicy(self.learner.policy)
        parts = SamplerParts(
            config, world, self.source, self.course, agent, self.reward, stop_ids, self.stop_here,
            window=room, ways=make_ways(config, agent, window),
        )  # fmt: skip
        self.sampler: Sampler
        if config.engine == "embedded":
            self.sampler = embedded_sampler(parts, replica, self.learner.policy)
        else:
            self.sampler = served_sampler(parts, model_folder, self.learner, self.tokenizer, self.stop)

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the last step. Raises InterruptedRunError when asked to stop; a recover checkpoint is there."""
        try:
            self._recover()
            if self.world.is_main and not self.saved_step == self.state.global_step == self.course.total_steps:
                self.measured.forget()  # the weights of the closing table will be, or are, other ones
            self.sampler.begin(self.state.next_task, self.state.taken)
            self._announce()
            if not gives_memory_away(self.config):  # else there is room only once the server has freed its memory
                self._check_logprobs()
            if self.state.global_step == 0 and self.evaluates:
                self._evaluate_before()
            if self.state.eval_due and self.evaluates:
                self._evaluate_heldout(self.state.global_step)
                self.state = replace(self.state, eval_due=False)
            while self.state.global_step < self.course.total_steps:
                self._step(self.state.global_step + 1)
            self._finish()
        except (RolloutInterruptedError, StepAbandonedError):
            self._interrupt()
        finally:
            self.sampler.close()
            self._finish_writing()

    def _step(self, number: int) -> None:
        began = time.perf_counter()
        self.clock = Clock()
        with self.clock.phase("rollout"):
            groups = self.sampler.batch(number)
        self._agree_to_go_on()
        with self.clock.phase("train"):
            self.sampler.free_for_training()
            batch, stats = self._learn(groups, number)
            self._rest(weights=False)
        with self.clock.phase("publish"):
            parts = self.sampler.publish(number)
            self._rest()
        for name, seconds in parts.items():
            batch.stats[f"weights_{name}_s"] = seconds
        batch.stats |= self.sampler.stats() | reward_counts(self.reward)
        if self.config.rollout.save_trajectories and self.world.is_main:
            with self.clock.phase("other"):
                path = self.paths.logs / "rollouts" / f"step_{number}.jsonl.zst"
                write_rollouts(path, groups, batch.advantages, self.tokenizer)
                if number % ROOM_STEPS == 0 and not self.told_room:
                    self._tell_room(path, number)
        self.state = replace(
            self.state,
            global_step=number,
            next_task=self.sampler.cursor.next_task,
            taken=self.sampler.cursor.taken,
            optimizer_steps=self.learner.optimizer_steps,
            version=number,
        )
        self._look_and_keep(number, groups, batch, stats, began)
        self._agree_to_go_on()

    def _tell_room(self, path: Path, number: int) -> None:
        """Warn, once, where trajectories will fill the disk. path: of those of step `number`."""
        if warning := room_warning(path, self.course.total_steps - number):
            self.told_room = True
            self.monitor.warn(warning)

    def _publish(self, version: int) -> None:
        self.sampler.publish(version)

    def _kept_before(self) -> str:
        done = self.config.supervised.dataset and start_facts(self.paths.supervised)
        return "its supervised start is done and kept" if done else ""

    def _learn(self, groups: list[Group], number: int) -> tuple[TrainingBatch, StepStats]:
        """All optimizer steps of a training step; returns the batch and the averaged statistics."""
        batch = self._make_batch(groups, number)
        rows = [row for minibatch in batch.minibatches for row in minibatch]
        later = [row for minibatch in batch.minibatches[1:] for row in minibatch]
        left_out = 0
        if self.config.recomputes_old:
            # The first minibatch takes them from its own forward pass, unless the weights of its rows depend on them.
            before = rows if self.config.weighs_kept else later
            for row, values in zip(before, self.learner.logprobs(before), strict=True):
                row.old_logprobs = values
            if self.config.weighs_kept:
                left_out = leave_out_rejected(batch, self.config)
                rows = [row for minibatch in batch.minibatches for row in minibatch]
        if self.reference is not None:
            for row, values in zip(rows, self.learner.logprobs(rows, self.reference), strict=True):
                row.ref_logprobs = values
        self._tell_idle(batch, number)
        stats = self._optimize(batch.minibatches, number)
        if left_out:
            stats.values["masked_tokens"] = stats.values.get("masked_tokens", 0.0) + left_out
        return batch, stats

    def _tell_idle(self, batch: TrainingBatch, number: int) -> None:
        """Warn where step after step has nothing to learn from, which costs as much as learning; on rank 0."""
        if not self.world.is_main or self.config.control.zero_advantages:
            return
        # Rows that sequence_mask rejected had something to teach; it has numbers of its own.
        learns = any(batch.advantages) or any(row.advantage for rows in batch.minibatches for row in rows)
        self.idle_in_row = 0 if learns else self.idle_in_row + 1
        if self.idle_in_row == IDLE_STEPS:
            self.monitor.warn(
                f"steps {number - IDLE_STEPS + 1} to {number} had nothing to learn from: all answers to a task were "
                f"rewarded alike (task_reward {batch.stats['task_reward']:.4g}). clusterkit trace shows some: either "
                "the reward does not tell them apart, or the tasks are too easy or too hard"
            )

    def _make_batch(self, groups: list[Group], number: int) -> TrainingBatch:
        """Rows of the step on rank 0, its numbers on all ranks."""
        if self.world.is_main:
            batch = make_batch(groups, self.config, number)
            self.world.broadcast(batch.stats)
            return batch
        return TrainingBatch([[] for _ in range(self.config.train.minibatches)], [], self.world.broadcast(None))

    def _look_and_keep(
        self, number: int, groups: list[Group], batch: TrainingBatch, stats: StepStats, began: float
    ) -> None:
        """Evaluate, checkpoint and report at the end of a step, in that order of cost."""
        if (waited := batch.stats.get("judge_wait_s")) is not None:
            batch.stats["judge_share"] = waited / (time.perf_counter() - began)
        if self._eval_due(number):
            with self.clock.phase("eval"):
                try:
                    self._evaluate_heldout(number)
                except RolloutInterruptedError:
                    # The step is done: it is reported and saved like any other, and the next attempt evaluates it.
                    self.state = replace(self.state, eval_due=True)
        numbers = self.reward_metrics.beside(batch.stats | stats.values, batch.metrics)
        processed = numbers["prompt_tokens"] + numbers["sampled_tokens"] + numbers["trained_tokens"]
        self._report_step(number, numbers, processed, began, [g.task.id for g in groups])

    def _finish(self) -> None:
        """Closing table, summary and the end of the log."""
        results = self._measure_all(AFTER) if self.evaluates else {}
        self._close(
            num_tasks=max((result.num_tasks for result in results.values()), default=0),
            trained_chunks=trained_chunks(self.config),
            trained_documents=getattr(self.source, "trained_documents", None),
            chance=getattr(self.source, "chance", None),
            score_name=self.config.reward.score_name,
            table=closing_table(self.paths.logs, results),
            **summary_facts(self.paths),
        )
        if self.world.is_main:
            self.measured.forget()

    # -- looking ----------------------------------------------------------------------------------------------------

    def _holds_out(self) -> bool:
        """Whether there is anything to evaluate on. Raises UserError where that is asked for and there is nothing."""
        split, every = self.config.eval.split, self.config.eval.every_steps
        assert split != "train"  # RunConfig allows it only where nothing is learned
        check_lengths(self.config, self.source)
        if self.source.num_heldout(split):
            return True
        if every:
            raise UserError(
                f"eval.every_steps={every}, and no task is held out for eval.split={split}: hold some out (a larger "
                "task.eval_fraction, a test file, or the other split), or set eval.every_steps=0"
            )
        self.monitor.info(
            f"No task is held out for eval.split={split}, so nothing is evaluated before and after the training: score "
            "checkpoints with clusterkit eval, or hold a share out with task.eval_fraction."
        )
        return False

    def _evaluate_before(self) -> None:
        results = self._measure_all(BEFORE)
        if self.world.is_main:
            store_before(self.paths.logs, results)

    def _evaluate_heldout(self, number: int) -> None:
        spec = table_specs(self.config)[0]
        greedy = evaluate(self.sampler.groups, self.source, spec)
        self._report_eval("heldout", number, spec, greedy)
        self.monitor.scalars(eval_scalars({"accuracy": greedy.accuracy, "metrics": greedy.metrics}), number)

    def _measure_all(self, name: str) -> dict[EvalSpec, EvalResult]:
        """All lines of the closing table; the training mixture is also sampled at the training temperature.

        name: BEFORE or AFTER. After the last step lines that an earlier attempt has measured are taken over.
        """
        # The tiny model has a word for an answer that it does not know: where the memory is blanked it must guess.
        refusal_ids = tuple(encode(self.tokenizer, NO_FACT)) if self.config.agent.template == "words" else ()
        lines, step = table_specs(self.config, refusal_ids), self.state.global_step
        kept = self.world.broadcast(self.measured.read(step) if name == AFTER and self.world.is_main else {})
        results = {spec: replace(kept[spec], seconds=0.0) for spec in lines if spec in kept}
        missing = [spec for spec in lines if spec not in results]
        if results:
            self.monitor.info(f"Of the closing table {len(results)} of {len(lines)} lines are there already.")
        for spec, result in results.items():
            self._report_eval(name, step, spec, result)
        at_temperature = [replace(s, temperature=self.config.rollout.temperature) for s in missing if s.is_mixture]
        measured = self.sampler.each(heldout_tasks(self.source, spec) for spec in (*at_temperature, *missing))
        sampled = result_of(*next(measured)) if at_temperature else None
        for spec, (groups, seconds) in zip(missing, measured, strict=True):
            result = result_of(groups, seconds)
            if spec.is_mixture and sampled is not None:
                self.heldout.write(groups, name)
                result = replace(result, sampled_accuracy=sampled.accuracy, seconds=seconds + sampled.seconds)
            results[spec] = result
            if name == AFTER and self.world.is_main and not (sampled and sampled.num_failed):
                self.measured.keep(step, results)
            self._report_eval(name, step, spec, result)
            if spec != missing[-1]:
                self._agree_to_go_on()  # several ranks that sample each for itself do not stop within a line
        return {spec: results[spec] for spec in lines}

    def _report_eval(self, name: str, number: int, line: EvalSpec, result: EvalResult) -> None:
        self.monitor.record(
            "eval",
            global_step=number,
            name=name,
            **line.line,
            score_name=self.config.reward.score_name,
            accuracy=result.accuracy,
            **result.record(),
        )
        lengths = {"chunks": line.chunks, "documents": line.documents}
        what = ", ".join(f"{number} {unit}" for unit, number in lengths.items() if number) or "training lengths"
        how = ", memory blanked" if line.blank_memory else ""
        how += f", {METHOD_LABELS[line.method]}" if line.method else ""
        self.monitor.info(
            f"Evaluation {name} ({what}{how}): {self.config.reward.score_name} {result.accuracy:.4f} "
            f"on {result.num_tasks} tasks."
        )
