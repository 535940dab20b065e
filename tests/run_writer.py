"""Writes run directories as docs/run-directory.md says, for tests of their readers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from clusterkit.config.resolve import resolve
from clusterkit.runs.directory import RunDirectory, user_name


class RunWriter:
    """One run directory; every method appends what the trainer would."""

    def __init__(self, fileroot: Path, experiment: str = "tiny-recall", trial: str = "run1"):
        self.run = RunDirectory(fileroot, user_name(), experiment, trial)
        self.run.logs.mkdir(parents=True)
        self.clock = time.time()
        self.number = 0

    def config(self, *overrides: str) -> RunWriter:
        values = resolve("tiny", None, overrides).config.model_dump()
        self.run.config.write_text(yaml.safe_dump(values, sort_keys=False))
        return self

    def record(self, kind: str, **fields: Any) -> RunWriter:
        line = {"kind": kind, "time": self.clock, "attempt": self.number, **fields}
        with self.run.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def attempt(self, resume_step: int = 0, total_steps: int = 30, **more: int) -> RunWriter:
        self.number += 1
        (self.run.logs / f"attempt_{self.number}").mkdir()
        steps = {"resume_step": resume_step, "total_steps": total_steps}
        return self.record("attempt", pid=1, ranks=1, threads=1, **steps, **more)

    def steps(self, first: int, last: int, seconds: float = 4.0, total_steps: int = 30, **stats: float) -> RunWriter:
        for step in range(first, last + 1):
            self.clock += seconds
            self.record(
                "step",
                epoch=1,
                epochs=1,
                epoch_step=step,
                steps_per_epoch=2048,
                global_step=step,
                total_steps=total_steps,
                step_time_s=seconds,
                tokens_per_s=12345.0,
                timings={"rollout": 0.75 * seconds, "train": 0.25 * seconds},
                stats={"task_reward": step / 100, **stats},
            )
        return self

    def recover(self, step: int, num_bytes: int = 12_000_000) -> RunWriter:
        self.run.recover.mkdir(parents=True, exist_ok=True)
        (self.run.recover / "LATEST").write_text("slot-a")
        return self.record("recover", global_step=step, slot="a", path="slot-a", bytes=num_bytes, seconds=0.1)

    def finish(self, status: str = "completed", step: int = 30, message: str = "") -> RunWriter:
        return self.record("finish", status=status, global_step=step, message=message)

    def summary(self, **changes: Any) -> RunWriter:
        value = {
            "status": "completed",
            "experiment_name": self.run.experiment,
            "trial_name": self.run.trial,
            "global_step": 30,
            "seconds": 200.0,
            "num_tasks": 128,
            "trained_chunks": [2, 4],
            "table": [
                {"chunks": 0, "blank_memory": False, "before": 0.34, "after": 0.98},
                {"chunks": 64, "blank_memory": False, "before": 0.14, "after": 0.97},
                {"chunks": 64, "blank_memory": True, "before": 0.0, "after": 0.0017},
            ],
            "chance": 0.0017,
            "checkpoint": "actor/epoch1epochstep30globalstep30",
            "time_split": {"warmup": 80.0, "rollout": 90.0, "train": 30.0},
        }
        self.run.summary.write_text(json.dumps({**value, **changes}))
        return self
