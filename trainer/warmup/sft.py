"""The supervised warm-up: dense recall practice, then demonstrations, then a gate. Its result is cached by content."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer import seeding, types
from trainer.agents import base, memagent, memalpha, memalpha_prompt, template
from trainer.config import RunConfig
from trainer.config_agents import MemalphaAgentConfig
from trainer.config_choice import as_class
from trainer.config_tasks import FactsConfig, RecallConfig
from trainer.engines.embedded import EmbeddedEngine
from trainer.errors import RunError
from trainer.evaluate import EvalSpec, evaluate
from trainer.rollout.controller import RolloutController
from trainer.staging import staged_folder
from trainer.tasks import facts, make_source, recall
from trainer.train import attention, logprobs, packing
from trainer.train.logprobs import PolicyModel, token_logprobs
from trainer.train.model import stop_token_ids
from trainer.train.packing import PackedBatch, pack
from trainer.warmup import demos, lessons, memory_demos, tiny
from trainer.warmup.lessons import Lesson, make_lesson, taught_agent

# Recall practice ends once the mean share of confident answers over RECALL_WINDOW steps reaches RECALL_TARGET.
RECALL_WINDOW, RECALL_TARGET = 10, 0.98
GATE_TASKS = 256
REPORT_EVERY_S = 1.0
SAVE_EVERY_S = 30.0

# The code that shapes the warmed-up weights: a change in it gives a new content hash.
SOURCES = (seeding, types, base, memagent, template, recall, attention, logprobs, packing, tiny, demos, lessons)
MEMORY_SOURCES = (facts, memalpha, memalpha_prompt, memory_demos)

Report = Callable[[dict[str, Any]], None]


class WarmupInterruptedError(Exception):
    """The warm-up was asked to stop; its state is on disk and the next call goes on from it."""


def own_words(config: RunConfig) -> list[str]:
    """Words that a task of the user's own needs beside those of recall: its `vocabulary()` where it has that method."""
    if "task.name" not in config.custom:
        return []
    vocabulary = getattr(make_source(config), "vocabulary", None)
    return [str(word) for word in vocabulary()] if vocabulary else []


def content_key(config: RunConfig) -> str:
    """Hash of everything that the warmed-up weights depend on: settings, code, library versions, threads."""
    digest = hashlib.sha256()
    memory = isinstance(config.agent, MemalphaAgentConfig)
    task = as_class(FactsConfig if memory else RecallConfig, config.task)
    agent = config.agent if memory else taught_agent(config)
    parts = {
        "model": config.model.model_dump(exclude={"lora"}),  # the warm-up trains all weights
        # A task or agent of the user's own is warmed up like ours: its name and options change nothing here.
        "task": task.model_dump(),
        "agent": agent.model_dump(),
        "warmup": config.warmup.model_dump(),
        "seed": config.seed,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **({"words": words} if (words := own_words(config)) else {}),
    }
    digest.update(json.dumps(parts, sort_keys=True).encode())
    for module in (*SOURCES, *(MEMORY_SOURCES if memory else ())):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:20]


@dataclasses.dataclass
class Warmup:
    """One warm-up.

    config: the run's configuration.
    folder: holds results and unfinished states.
    report: gets progress records.
    stop_requested: called after every step; True ends the warm-up.
    begun: gets the model before the first step; what it raises ends the warm-up.
    """

    config: RunConfig
    folder: Path
    report: Report
    stop_requested: Callable[[], bool] = lambda: False
    begun: Callable[[Any], None] = lambda _: None

    def result(self) -> Path:
        """Folder of the warmed-up checkpoint (Hugging Face format), trained now or found in the cache.

        Raises:
            RunError: no initialisation passed the gate.
            WarmupInterruptedError: `stop_requested` said so.
        """
        done = self.folder / content_key(self.config)
        if (done / "warmup.json").exists():
            self.report({"phase": "gate", "cached": True, **json.loads((done / "warmup.json").read_text())})
            return done
        lesson = make_lesson(self.config)
        tokenizer = tiny.make_tokenizer([*lesson.words, *own_words(self.config)])
        lesson.teach(tokenizer)  # refuses limits that do not fit, before anything is learned
        scores: list[float] = []
        for attempt in range(self.config.warmup.retries + 1):
            init_seed = seeding.derive_seed(self.config.seed, "init", attempt) % 2**31
            lm, score = self._train(lesson, tokenizer, init_seed, done.with_name(f"{done.name}.{attempt}.partial"))
            scores.append(score)
            if score >= self.config.warmup.gate:
                _store(lm, tokenizer, done, {"init_seed": init_seed, "attempts": attempt + 1, "accuracy": score})
                return done
        raise RunError(
            f"the warm-up missed its gate of {self.config.warmup.gate:.0%} in every one of {len(scores)} "
            f"initialisations (reached {', '.join(f'{s:.1%}' for s in scores)}): raise warmup.steps, "
            "warmup.recall_steps or warmup.retries, or lower warmup.gate"
        )

    def _train(self, lesson: Lesson, tokenizer: Any, init_seed: int, partial: Path) -> tuple[Any, float]:
        warmup = self.config.warmup
        began = time.perf_counter()
        lm = tiny.make_lm(self.config.model, tokenizer, init_seed)
        self.begun(lm)
        agent, demonstrations = lesson.teach(tokenizer)
        loop = _Loop(lm, self, init_seed, partial)

        def recall_batch(step: int) -> PackedBatch:
            rows, weights = demonstrations.recall_rows(warmup.batch_size, init_seed, "recall", step)
            return dataclasses.replace(pack(rows, torch.device("cpu"), share=False), weights=torch.tensor(weights))

        def demo_batch(step: int) -> PackedBatch:
            rows = demonstrations.conversations(warmup.batch_size, init_seed, "demo", step)
            return pack(rows, torch.device("cpu"), share=False)

        loop.run("recall", warmup.recall_steps, recall_batch, decay=False, target=RECALL_TARGET)
        loop.run("sft", warmup.steps, demo_batch, decay=True)
        engine = EmbeddedEngine(lm.eval(), stop_token_ids(lm, tokenizer), self.config.rollout.max_batch_tokens)
        controller = RolloutController(agent, engine, self.config.seed, reward=lesson.reward)
        score = lesson.passed(evaluate(controller.run, lesson.source, EvalSpec("dev", GATE_TASKS, chunks=1)))
        seconds = round(time.perf_counter() - began, 3)
        self.report({"phase": "gate", "accuracy": score, "init_seed": init_seed, "cached": False, "seconds": seconds})
        partial.unlink(missing_ok=True)
        return lm, score


class _Loop:
    """Trains with AdamW on demonstrations; can go on after any step."""

    def __init__(self, lm: Any, warmup: Warmup, init_seed: int, partial: Path) -> None:
        self.policy = PolicyModel(lm)
        self.settings = warmup.config.warmup
        self.warmup = warmup
        self.init_seed = init_seed
        self.partial = partial
        self.optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
        self.resume: dict[str, Any] | None = None
        with suppress(OSError, RuntimeError, EOFError, pickle.UnpicklingError):  # unreadable: the warm-up starts over
            self.resume = torch.load(partial, weights_only=True)
        if self.resume is not None:
            self.policy.load_state_dict(self.resume["policy"])
            self.optimizer.load_state_dict(self.resume["optimizer"])

    def run(
        self,
        phase: str,
        steps: int,
        make_batch: Callable[[int], PackedBatch],
        *,
        decay: bool,
        target: float | None = None,
    ) -> None:
        """Train on `make_batch(step)` for `steps` steps, or until the recent accuracy reaches `target`.

        Args:
            phase: name of the phase, for reports and the saved state.
            make_batch: step -> its batch.
            decay: decay the learning rate linearly to a tenth.
            target: accuracy over RECALL_WINDOW steps that ends the phase.
        """
        start, recent = self._resume_point(phase)
        last_report, tokens, began = 0.0, 0, time.perf_counter()
        last_saved = began
        for step in range(start, steps):
            if target is not None and len(recent) == RECALL_WINDOW and sum(recent) / RECALL_WINDOW >= target:
                break
            batch = make_batch(step)
            loss, confident = self._step(batch, self._rate(step, steps, decay))
            recent.append(confident)
            tokens += batch.input_ids.numel()
            now = time.perf_counter()
            if now - last_report >= REPORT_EVERY_S or step + 1 == steps:
                last_report = now
                self.warmup.report(
                    {
                        "phase": phase,
                        "step": step + 1,
                        "steps": steps,
                        "loss": loss,
                        "accuracy": sum(recent) / len(recent),
                        "tokens_per_s": tokens / (now - began),
                        "remaining_s": round((now - began) / (step + 1 - start) * (steps - step - 1), 1),
                        "init_seed": self.init_seed,
                        "cached": False,
                    }
                )
            if self.warmup.stop_requested():
                self._save(phase, step + 1, recent)
                raise WarmupInterruptedError
            if now - last_saved >= SAVE_EVERY_S:
                last_saved = now
                self._save(phase, step + 1, recent)

    def _rate(self, step: int, steps: int, decay: bool) -> float:
        ramp = min(1.0, (step + 1) / 20)
        return self.settings.learning_rate * ramp * ((1 - 0.9 * step / steps) if decay else 1.0)

    def _step(self, batch: PackedBatch, rate: float) -> tuple[float, float]:
        """One optimizer step; returns the loss, and the share of weighted tokens with a probability above one half."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        logp, _ = token_logprobs(self.policy, batch, temperature=1.0)
        loss: Tensor = -(batch.weights * logp).sum() / batch.weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        right = (batch.weights * (logp.detach() > -0.6931)).sum() / batch.weights.sum()
        return float(loss.detach()), float(right)

    def _resume_point(self, phase: str) -> tuple[int, deque[float]]:
        """First step of `phase` that is still to be done, and the recent accuracies at that point."""
        empty: deque[float] = deque(maxlen=RECALL_WINDOW)
        if self.resume is None:
            return 0, empty
        if self.resume["phase"] == phase:
            point = (int(self.resume["step"]), deque(self.resume["recent"], maxlen=RECALL_WINDOW))
            self.resume = None
            return point
        return 1 << 62, empty  # the state is of a later phase: this one is over

    def _save(self, phase: str, step: int, recent: deque[float]) -> None:
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.partial.with_name(f"{self.partial.name}.tmp{os.getpid()}")
        state = {
            "phase": phase,
            "step": step,
            "recent": list(recent),
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        try:
            torch.save(state, temporary)
            temporary.replace(self.partial)
        finally:
            temporary.unlink(missing_ok=True)


def _store(lm: Any, tokenizer: Any, folder: Path, facts: dict[str, Any]) -> None:
    """Put the checkpoint into the cache, all of it or nothing. Where another run was faster, its result is the same."""
    if (folder / "warmup.json").exists():
        return
    with staged_folder(folder, replace=True) as staging:
        lm.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        (staging / "warmup.json").write_text(json.dumps(facts))
