"""trainer.type=null: trajectories of a number of tasks with their rewards, written to rollouts/; nothing is learned.

Every batch of tasks is a step, and its file is whole or absent; `progress.json` says how many there are, so that a run
that was interrupted goes on with the first task that is not written yet.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import zstandard

from trainer.agents import make_agent
from trainer.agents.base import check_window
from trainer.base_run import Attempt
from trainer.checkpoint.fingerprint import differences
from trainer.checkpoint.start import Start, settings_and_data
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, UserError
from trainer.files import write_atomic
from trainer.metrics import epoch_line, stats_line, step_scalars
from trainer.paths import RunPaths
from trainer.rewards.make import make_reward
from trainer.rewards.qa import qa_metrics
from trainer.rollout.batch import RewardMetrics, reward_metrics, rollout_stats
from trainer.rollout.controller import RolloutInterruptedError, SamplingPlan
from trainer.rollout.record import write_rollouts
from trainer.rollout.sampler import Sampler
from trainer.rollout.samplers import SamplerParts, embedded_sampler, served_sampler
from trainer.schedule import Schedule
from trainer.tasks import leave_out_misfits, make_source
from trainer.tasks.base import TaskSource
from trainer.train.logprobs import PolicyModel
from trainer.train.model import context_window, describe, load_lm, load_tokenizer, stop_token_ids
from trainer.types import Group, Task

PROGRESS, TABLE = "progress.json", "table.csv"
# Numbers of a training batch that mean nothing here.
UNUSED = ("advantage_abs", "disable_value", "mask_no_eos_with_zero", "n_valid_tokens", "final_reward")


def number_of_tasks(config: RunConfig, source: TaskSource) -> int:
    """Tasks in all: `eval.num_tasks`, or as many as the split has."""
    split = config.eval.split
    return min(config.eval.num_tasks, source.train_size if split == "train" else source.num_heldout(split))


def shape_of(config: RunConfig, data: dict[str, str] | None = None) -> dict[str, Any]:
    """What shapes the trajectories: settings and data of a training run, and which tasks are asked for.

    data: digests of its data files; None: they are read for it.
    """
    return settings_and_data(config, data) | {"eval.split": config.eval.split}


def find_rollouts(config: RunConfig, paths: RunPaths) -> Start:
    """How far an earlier attempt came. Changes nothing on disk.

    Raises:
        UserError: it had other settings, some of its files are missing, or one is demanded and there is none.
    """
    folder = paths.logs / "rollouts"
    if config.recover_mode == "disabled":
        return Start(None)
    try:
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        done, next_task, settings = int(progress["step"]), int(progress["next_task"]), dict(progress["settings"])
    except FileNotFoundError:
        if config.recover_mode == "resume":
            raise UserError(f"there are no trajectories under {folder} to go on from: leave recover_mode out") from None
        if (folder / step_file(2)).exists():  # the first is written before this file is
            raise UserError(
                f"{folder / PROGRESS} is missing, and there are trajectories: put it back, or start afresh with "
                "recover_mode=disabled (which removes them) or another trial_name"
            ) from None
        return Start(None)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder / PROGRESS} cannot be read ({error}): start afresh with recover_mode=disabled, or another "
            "trial_name"
        ) from error
    if changed := differences(settings, shape_of(config)):
        raise UserError(
            f"the trajectories of {done} steps were made with other settings or data (then -> now):\n  "
            + "\n  ".join(changed)
            + "\nto go on: put them back. To start afresh: trial_name=NEW, or recover_mode=disabled"
        )
    missing = [n for n in range(1, done + 1) if not (folder / step_file(n)).is_file()]
    if missing:
        raise UserError(
            f"{folder / step_file(missing[0])} is missing: put it back, or start afresh with recover_mode=disabled"
        )
    return Start(None, done=done, next_task=next_task)


def step_file(number: int) -> str:
    """Name of a step's trajectories within rollouts/."""
    return f"step_{number}.jsonl.zst"


class RolloutRun:
    """One attempt. `global_step`: batches that are written."""

    def __init__(self, attempt: Attempt) -> None:
        config, model_folder, world, start = attempt.config, attempt.model_folder, attempt.world, attempt.start
        self.config, self.world, self.monitor, self.stop = config, world, attempt.monitor, attempt.stop
        self.paths, self.fresh = RunPaths.of(config), not start.done
        self.folder = self.paths.logs / "rollouts"
        self.shape = shape_of(config, start.data) if world.is_main else {}
        self.source = make_source(config)
        self.tokenizer = load_tokenizer(model_folder)
        embedded = config.engine == "embedded"
        # Servers compute log-probs themselves: any class of model will do, and its weights are theirs.
        lm = load_lm(model_folder, config.model).to(world.device) if embedded else describe(model_folder)
        agent, window = make_agent(config, self.tokenizer), context_window(lm, config.model)
        check_window(agent, window)
        stop_here = self.stop if world.size == 1 else lambda: False
        if told := leave_out_misfits(self.source, agent):
            self.monitor.warn(told)
        course = Schedule(1, 1, 1, 1)  # nothing is trained: only `groups` of the sampler is used
        ids = stop_token_ids(lm, self.tokenizer)
        reward = make_reward(config, self.tokenizer)
        parts = SamplerParts(config, world, self.source, course, agent, reward, ids, stop_here, window)
        self.sampler: Sampler
        if embedded:
            self.sampler = embedded_sampler(parts, lm.eval(), PolicyModel(lm))
        else:
            self.sampler = served_sampler(parts, model_folder, None, self.tokenizer, self.stop)
        self.tasks = number_of_tasks(config, self.source)
        if not self.tasks:
            raise UserError(f"eval.split={config.eval.split} has no task: choose another split, or hold out more")
        self.global_step, self.next_task = start.done, start.next_task
        left = max(self.tasks - self.next_task, 0)
        self.total_steps = self.global_step + -(-left // config.rollout.batch_size)
        self.seconds = 0.0
        self.reward_metrics = RewardMetrics(self.monitor.warn)

    def run(self) -> None:
        """Roll out the tasks that are left, then write the table. Raises InterruptedRunError when asked to stop."""
        if self.fresh and self.world.is_main:
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.paths.logs / "summary.json").unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        kind, steps = self.config.trainer.type, {"resume_step": self.global_step, "total_steps": self.total_steps}
        self.monitor.record("attempt", type=kind, **steps, **self.world.facts())
        try:
            while self.next_task < self.tasks:
                self._step(self.global_step + 1)
                if self.world.any(self.stop()) and self.next_task < self.tasks:
                    raise RolloutInterruptedError
        except RolloutInterruptedError:
            step = self.global_step
            kept = f"the trajectories of {self.next_task} tasks are written" if step else "no step was finished yet"
            raise InterruptedRunError(
                f"interrupted after step {step}: {kept}; the same command goes on from there"
            ) from None
        finally:
            self.sampler.close()
        if self.world.is_main:
            self._finish()

    def _step(self, number: int) -> None:
        began = time.perf_counter()
        c = self.config.rollout
        last = min(self.next_task + c.batch_size, self.tasks)
        plan = SamplingPlan(f"rollout-{self.config.eval.split}", c.group_size, c.temperature)
        groups = self.sampler.groups([self._task(i) for i in range(self.next_task, last)], plan)
        rolled = time.perf_counter()
        self.global_step, self.next_task = number, last
        if self.world.is_main:
            count = sum(len(group.trajectories) for group in groups)
            write_rollouts(self.folder / step_file(number), groups, [0.0] * count, self.tokenizer)
            progress = {"step": number, "next_task": last, "settings": self.shape}
            write_atomic(self.folder / PROGRESS, json.dumps(progress))
        self._report(number, groups, rolled - began, time.perf_counter() - began)

    def _task(self, index: int) -> Task:
        split = self.config.eval.split
        return self.source.train(index) if split == "train" else self.source.heldout(split, index)

    def _report(self, number: int, groups: list[Group], rollout_s: float, seconds: float) -> None:
        trajectories = [t for group in groups for t in group.trajectories]
        rewards = [t.reward for t in trajectories]
        own = rollout_stats(trajectories, rewards, torch.zeros(0), [])
        own = {name: value for name, value in own.items() if name not in UNUSED}
        stats = dict(sorted(self.reward_metrics.beside(own, reward_metrics(trajectories)).items()))
        self.seconds += seconds
        position = Schedule(self.total_steps, self.total_steps, 1, 1).position(number)
        self.monitor.info(stats_line(stats).replace("actor_train", "rollout"))
        self.monitor.info(epoch_line(position, round(stats["n_tokens"]), seconds, self.seconds, None))
        record = {
            "step_time_s": round(seconds, 4),
            "tokens_per_s": round(stats["n_tokens"] / seconds, 1),
            "timings": {"rollout": round(rollout_s, 4), "other": round(seconds - rollout_s, 4)},
            "stats": stats,
            "machine": self.monitor.usage(),
        }
        self.monitor.record("step", **position, **record, task_ids=[group.task.id for group in groups])
        self.monitor.scalars(step_scalars(record), number)

    def _finish(self) -> None:
        """The table of all trajectories, its summary, and the end of the log."""
        totals = write_table(self.folder, self.global_step)
        summary = {
            "status": "completed",
            "experiment_name": self.config.experiment_name,
            "trial_name": self.config.trial_name,
            "global_step": self.global_step,
            "num_tasks": totals["tasks"],
            "rollouts": totals,
            "rollouts_table": str(self.folder / TABLE),
            "chance": getattr(self.source, "chance", None),
        }
        write_atomic(self.paths.logs / "summary.json", json.dumps(summary, indent=1))
        self.monitor.info("Experiment Completes! Yeah!!!!!!!!")


def read_trajectories(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Every trajectory of the steps' files, in order."""
    for number in range(1, steps + 1):
        with zstandard.open(folder / step_file(number), "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def write_table(folder: Path, steps: int) -> dict[str, Any]:
    """Write table.csv, a line a trajectory, and return what it comes to."""
    rewards: dict[str, list[float]] = defaultdict(list)
    metrics: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["task_id", "sample", "reward", "answer", "gold", "turns", "response_tokens", "error"])
    for one in read_trajectories(folder, steps):
        tokens = sum(len(turn["response_ids"]) for turn in one["turns"])
        row = [one["task_id"], one["sample"], one["reward"], one["answer"], " | ".join(one["answers"])]
        writer.writerow([*row, len(one["turns"]), tokens, one["error"] or ""])
        rewards[one["task_id"]].append(one["reward"])
        if one["answers"]:
            metrics.update(qa_metrics(one["answer"], one["answers"]))
        sums.update(
            trajectories=1, failed=one["error"] is not None, turns=len(one["turns"]), tokens=tokens,
            truncated=one["counters"].get("truncated_final", 0), judged=bool(one["answers"]),
        )  # fmt: skip
    write_atomic(folder / TABLE, text.getvalue())
    count = sums["trajectories"]
    return {
        "tasks": len(rewards),
        "trajectories": count,
        "mean_reward": sum(map(sum, rewards.values())) / count,
        "best_reward": sum(map(max, rewards.values())) / len(rewards),
        "worst_reward": sum(map(min, rewards.values())) / len(rewards),
        "metrics": {name: value / sums["judged"] for name, value in metrics.items()} if sums["judged"] else {},
        "failed": sums["failed"],
        "truncated": sums["truncated"],
        "mean_turns": sums["turns"] / count,
        "mean_response_tokens": sums["tokens"] / count,
    }
