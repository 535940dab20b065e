"""The supervised loop: a batch of examples, an optimizer step, held-out loss, checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from heapq import nlargest
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base_run import Attempt, Clock, SteppedRun
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.metrics import eval_scalars
from trainer.rollout.batch import set_weights
from trainer.schedule import Schedule
from trainer.sft.rows import Encoded, Making, RowMaker, processes_of
from trainer.tasks.examples import Example, load_examples
from trainer.train.learner import Learner, StepAbandonedError, StepStats
from trainer.train.loading import Origin
from trainer.train.logprobs import token_logprobs
from trainer.train.model import context_window, load_tokenizer
from trainer.train.packing import PackedBatch
from trainer.types import Row


class SftLearner(Learner):
    """As `Learner`, with cross entropy instead of a policy's loss."""

    SUMS = ("loss", "entropy", "likely", "tokens")

    def step(self, rows: list[Row], abandon: Callable[[], bool] = lambda: False) -> StepStats:
        """See `Learner.step`."""
        stats = super().step(rows, abandon)
        stats.values.pop("behave_ratio_max_dev", None)  # nothing was sampled
        return stats

    def _forward(self, batch: PackedBatch, model: nn.Module) -> tuple[Tensor, Tensor]:
        return token_logprobs(model, batch, 1.0, self.config.train.logprob_chunk)

    def _loss(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        logp, entropy = self._forward(batch, self.policy)
        # A stand-in row of weight 0 keeps ranks in step and must not show in the loss or the statistics.
        real = batch.weights > 0
        loss = -(batch.weights * torch.where(real, logp, 0.0)).sum()
        with torch.no_grad():
            likely = real & (logp > -0.6931)
            sums = [
                loss.double(), torch.where(real, entropy.double(), 0.0).sum(), likely.double().sum(),
                real.double().sum(),
            ]  # fmt: skip
            part = torch.stack(sums)
        return loss, part, torch.zeros_like(part[0])

    def _means(self, total: dict[str, float]) -> dict[str, float]:
        """loss: per answer token. likely: share of the answers' tokens that had more than half of the probability."""
        tokens = max(total["tokens"], 1.0)
        return {
            "loss": total["loss"],
            "entropy": total["entropy"] / tokens,
            "likely": total["likely"] / tokens,
            "trained_tokens": total["tokens"],
        }


BEFORE = "before.json"
LONG_TEXTS = 64


class SftRun(SteppedRun):
    """One attempt at supervised fine-tuning. The rows of a step are made while the one before is trained."""

    learner: SftLearner

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        config, model_folder, world = attempt.config, attempt.model_folder, attempt.world
        self.examples = load_examples(config.examples)
        self.tokenizer = load_tokenizer(model_folder)
        self._maker = RowMaker(config, self.tokenizer, processes_of(config) if world.device.type == "cuda" else 0)
        origin = Origin(model_folder, config, world)
        self.longest = min(context_window(origin.lm, config.model), config.train.max_tokens_per_mb)
        self.course = Schedule.of(config, len(self.examples.train))
        steps = self.course.total_steps * config.train.minibatches
        self.learner = SftLearner(origin.lm, config, world, steps, origin.weights)
        self._order = lru_cache(maxsize=2)(lambda epoch: self.examples.order(config.seed, epoch))
        self._told = self._told_memory = self._told_misfit = False
        self._ahead: tuple[int, list[Making]] = (0, [])  # of which step

    def run(self) -> None:
        """Train until the last step. Raises InterruptedRunError when asked to stop; a recover checkpoint is there."""
        self._recover()
        self._announce()
        e = self.examples
        self.monitor.info(f"{e.path}: {len(e.train)} examples to learn from, {len(e.heldout)} held out.")
        try:
            if self.state.global_step < self.course.total_steps:
                self.longest_row = self._longest_row()
                self._check_logprobs()
            if self.state.global_step == 0:
                before = self._measure("before")
                if self.world.is_main:
                    write_atomic(self.paths.logs / BEFORE, json.dumps(before))
            while self.state.global_step < self.course.total_steps:
                self._step(self.state.global_step + 1)
            self._finish()
        except StepAbandonedError:
            self._interrupt()
        finally:
            self._maker.close()
            self._finish_writing()

    def _publish(self, version: int) -> None:
        """Nobody samples from these weights."""

    def _step(self, number: int) -> None:
        began = time.perf_counter()
        self.clock = Clock()
        with self.clock.phase("other"):
            minibatches, left_out = self._minibatches(number)
        with self.clock.phase("train"):
            stats = self._optimize(minibatches, number)
        self.state = replace(
            self.state,
            global_step=number,
            next_task=self.course.first_task(number + 1),
            optimizer_steps=self.learner.optimizer_steps,
            version=number,
        )
        if self._eval_due(number):
            with self.clock.phase("eval"):
                self._measure("heldout")
        rows = [row for minibatch in minibatches for row in minibatch]
        tokens = float(sum(row.num_tokens for row in rows))
        counts = {
            "n_seqs": float(len(rows)),
            "n_tokens": tokens,
            "prompt_tokens": float(sum(len(row.prompt_ids) for row in rows)),
            "avg_seq_len": tokens / max(len(rows), 1),
            "too_long": float(left_out),
        }
        self._report_step(number, counts | stats.values, tokens, began, [e.id for e in self._batch(number)])
        self._agree_to_go_on()

    def _batch(self, number: int) -> list[Example]:
        first = self.course.first_task(number)
        size = len(self.examples.train)
        places = (divmod(index, size) for index in range(first, first + self.course.batch_size))
        return [self.examples.train[self._order(epoch)[place]] for epoch, place in places]

    def _minibatches(self, number: int) -> tuple[list[list[Row]], int]:
        """Rows of every optimizer step, with their weights, and how many answers were left out."""
        found, made = self._ahead
        if found != number:
            made = self._begin(number)
        encoded = [making.result() for making in made]
        if number < self.course.total_steps:
            self._ahead = (number + 1, self._begin(number + 1))
        for one in encoded:
            self._tell(one)
            set_weights(one.rows, "token")
        return [one.rows for one in encoded], sum(one.left_out for one in encoded)

    def _begin(self, number: int) -> list[Making]:
        """Have the rows of a step made."""
        examples = self._batch(number)
        size = len(examples) // self.config.train.minibatches
        parts = [examples[first : first + size] for first in range(0, len(examples), size)]
        return [self._maker.begin(part, self.longest) for part in parts]

    def _longest_row(self) -> int:
        """Tokens of the longest row of any step, by the longest texts: to tokenise all of them takes too long."""
        texts = nlargest(LONG_TEXTS, self.examples.train, lambda e: sum(len(text) for _, text in e.messages))
        made = self._maker.begin(texts, self.longest).result()
        self._tell(made)
        return min(made.longest or self.longest, self.longest)

    def _tell(self, encoded: Encoded) -> None:
        """Warn of each kind of thing that is left out, once."""
        if encoded.misfit and not self._told_misfit:
            self._told_misfit = True
            self.monitor.warn(f"{self.examples.path}: traces that the agent cannot take are left out: {encoded.misfit}")
        if encoded.long_memories and not self._told_memory:
            self._told_memory = True
            self.monitor.warn(
                f"{self.examples.path}: memories that do not fit into agent.max_memory_tokens="
                f"{self.config.agent.response_limit('update')} are left out, and what follows them: raise it "
                "to learn them, too"
            )
        if encoded.too_long and not self._told:
            self._told = True
            self.monitor.warn(
                f"{self.examples.path}: answers that need more than {self.longest} tokens with what comes before them "
                f"are left out (one has {encoded.longest}): the smaller of train.max_tokens_per_mb and the model's "
                "context"
            )

    def _measure(self, name: str) -> dict[str, Any]:
        """Held-out loss per answer token, recorded; the same on all ranks."""
        began = time.perf_counter()
        examples = self.examples.heldout[: self.config.eval.num_tasks]
        encoded = self._maker.begin(examples, self.longest).result()
        self._tell(encoded)
        rows = encoded.rows
        if not rows:
            why, way = (
                f"needs more than {self.longest} tokens",
                "train.max_tokens_per_mb, or use a model with more context",
            )
            if encoded.long_memories and not encoded.too_long:
                why, way = "comes after a memory over agent.max_memory_tokens", "that"
            raise UserError(f"{self.examples.path}: every held-out answer {why}: raise {way}")
        values = [value for logprobs in self.learner.logprobs(rows) for value in logprobs]
        tokens = sum(len(row.response_ids) for row in rows)
        loss = self.world.broadcast(-sum(values) / tokens)  # rank 0 has the values
        number = self.state.global_step
        seconds = round(time.perf_counter() - began, 3)
        result = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "num_tasks": len(examples)}
        self.monitor.record(
            "eval",
            global_step=number,
            name=name,
            chunks=0,
            blank_memory=False,
            **result,
            tokens=tokens,
            seconds=seconds,
        )
        self.monitor.info(f"Evaluation {name}: loss {loss:.4f} per answer token on {len(examples)} examples.")
        self.monitor.scalars(eval_scalars(result), number)
        return {**result, "seconds": seconds}

    def _finish(self) -> None:
        after = self._measure("after")
        try:
            before = json.loads((self.paths.logs / BEFORE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = {}
        self._close(
            num_tasks=after["num_tasks"],
            heldout_loss={"before": before.get("loss"), "after": after["loss"]},
        )
