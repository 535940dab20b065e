"""Real training runs of a model so small that a step takes hundredths of a second, and processes to run them in."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from clusterkit.runs.log.metrics import History, read_history
from trainer.config import RunConfig
from trainer.config_choices import CHOICES
from trainer.paths import RunPaths

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_worker_niceness": "0"}
"""Of processes that tests start. Ray would give its workers the niceness 15: beside other tests they, and the ranks and
servers that they start, got one to three hundredths of a core.
"""
DEADLINE_S = 600.0
TOTAL_STEPS = 12

SETTINGS: dict[str, Any] = {
    "experiment_name": "small",
    "trial_name": "run1",
    "model.tiny": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    },
    "task": {"train_size": 24, "min_chunks": 1, "max_chunks": 2, "facts_per_chunk": 2, "filler_per_chunk": 2}
    | {"num_keys": 8},
    "agent": {"template": "words", "chunk_tokens": 10, "max_question_tokens": 8, "max_memory_tokens": 4}
    | {"max_final_tokens": 5},
    "rollout": {"batch_size": 4, "group_size": 4},
    "train": {"total_steps": TOTAL_STEPS, "learning_rate": 1e-3, "warmup_steps": 2, "threads": 1},
    "warmup": {"recall_steps": 150, "steps": 150, "batch_size": 16, "learning_rate": 3e-3, "gate": 0.0, "retries": 0},
    "eval": {"every_steps": 5, "num_tasks": 4, "final_chunks": [], "blank_memory": False},
    "checkpoint": {"ckpt_freq_secs": 0.0, "ckpt_first_step": 1, "save_freq_steps": 4, "save_freq_epochs": 0},
    "monitor": {"tensorboard": False},
}


class Trial:
    """One run: its configuration file and what it leaves on disk. Settings are given with dotted names."""

    def __init__(self, fileroot: Path, cache: Path, **changes: Any) -> None:
        self.values: dict[str, Any] = {}
        self._made = (fileroot, cache, changes)
        self.file = fileroot / "config.yaml"
        self.console = fileroot.with_name(f"{fileroot.name}.console.log")
        fileroot.mkdir(parents=True, exist_ok=True)
        self.change(**SETTINGS)
        self.change(**{"fileroot": str(fileroot), "cache_dir": str(cache), **changes})

    def change(self, **settings: Any) -> RunConfig:
        """Set dotted names (merging sections) and write the file again."""
        for name, value in settings.items():
            *sections, leaf = name.split(".")
            place = self.values
            for section in sections:
                place = place.setdefault(section, {})
            place[leaf] = {**place.get(leaf, {}), **value} if isinstance(value, dict) else value
        self._leave_out_others()
        self.file.write_text(yaml.safe_dump(self.values))
        self.config = RunConfig.model_validate(self.values)
        self.paths = RunPaths.of(self.config)
        return self.config

    def _leave_out_others(self) -> None:
        """Take out what SETTINGS have for another task or agent than the one that was set, as presets do."""
        for section, choice in CHOICES.items():
            part = self.values.get(section, {})
            name = part.get(choice.key, choice.default)
            for field in [field for field in part if choice.lacks(name, field) and field in SETTINGS[section]]:
                del part[field]

    def kept(self) -> Callable[[], Trial]:
        """Keep the folder as it is now; what is returned puts it back, as often as it is called."""
        fileroot, cache, changes = self._made
        copy = fileroot.with_name(f"{fileroot.name}.kept")
        shutil.copytree(fileroot, copy)

        def restored() -> Trial:
            shutil.rmtree(fileroot)
            shutil.copytree(copy, fileroot)
            return Trial(fileroot, cache, **changes)

        return restored

    def records(self, kind: str = "") -> list[dict[str, Any]]:
        """Complete records of metrics.jsonl, of one kind or of all."""
        path = self.paths.logs / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        records = [json.loads(line) for line in lines if line]
        return [r for r in records if not kind or r["kind"] == kind]

    def history(self) -> History:
        """The run without what was undone, by the rule of docs/run-directory.md."""
        return read_history(self.paths.logs / "metrics.jsonl")

    def trained_tasks(self) -> list[str]:
        """Ids of the tasks that the run learned from, in order."""
        return [task for step in self.history().steps for task in step["task_ids"]]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.paths.logs / "summary.json").read_text())

    def log(self) -> str:
        return (self.paths.logs / "main.log").read_text()

    def said(self) -> str:
        """What the latest processes printed."""
        return self.console.read_text() if self.console.exists() else ""

    def weights(self) -> dict[str, bytes]:
        """Bytes of every safetensors file, by checkpoint name."""
        return {p.parent.name: p.read_bytes() for p in self.paths.checkpoints.glob("epoch*[0-9]/*.safetensors")}

    def recover_files(self) -> dict[str, bytes]:
        """Everything under the recover folder."""
        root = self.paths.recover
        return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}

    def newest_slot(self) -> Path:
        return self.paths.recover / (self.paths.recover / "LATEST").read_text().strip()


SHORT_WARMUP = {"warmup.recall_steps": 2, "warmup.steps": 2}
"""For runs of another task than the reference's: their warm-up is in no cache, and nobody compares their weights."""

NewTrial = Callable[..., Trial]
"""The fixture `new_trial`: makes a trial from a name and settings."""


class Forks:
    """A process that has imported the trainer and forks one for every attempt; one at a time."""

    def __init__(self) -> None:
        script = REPOSITORY / "tests" / "trainer_forks.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # What main() sets before the imports that are made ahead of it here.
            env={**ENVIRONMENT, "PYTHONPATH": str(REPOSITORY), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        self.answers: queue.Queue[str] = queue.Queue()
        self.latest: Attempt | None = None
        threading.Thread(target=self._read, daemon=True).start()
        assert self.answers.get(timeout=DEADLINE_S) == "ready"

    def start(
        self, trial: Trial, *flags: str, fill: tuple[Path, int] | None = None, fill_at: str = "room_warning"
    ) -> Attempt:
        """Start an attempt at a trial.

        Args:
            fill: a disk, and what is left of it from a moment on.
            fill_at: function of `trainer.base_run` that is called just before; room for checkpoints is looked for.
        """
        if self.latest is not None and self.latest.running():  # of a test that has failed
            self.latest.send(signal.SIGKILL)
            self.latest.end()
        filled = (str(fill[0]), fill[1]) if fill else None
        command = {"argv": [str(trial.file), *flags], "console": str(trial.console), "fill": filled}
        command["fill_at"] = fill_at
        trial.console.unlink(missing_ok=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        self.latest = Attempt(int(self.answers.get(timeout=DEADLINE_S).removeprefix("pid ")), self.answers)
        return self.latest

    def run(self, trial: Trial, *flags: str, **fill: Any) -> int:
        """Run an attempt to its end; returns the exit code. fill: as `start`."""
        return self.start(trial, *flags, **fill).end()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line.strip())


class Attempt:
    """A trainer's process."""

    def __init__(self, pid: int, answers: queue.Queue[str]) -> None:
        self.pid, self._answers, self.code = pid, answers, None

    def running(self) -> bool:
        if self.code is None:
            try:
                self.code = int(self._answers.get_nowait().removeprefix("exit "))
            except queue.Empty:
                return True
        return False

    def send(self, number: signal.Signals) -> None:
        if self.running():
            os.kill(self.pid, number)

    def end(self) -> int:
        """Wait for the end; returns the exit code (negative: ended by that signal)."""
        if self.code is None:
            self.code = int(self._answers.get(timeout=DEADLINE_S).removeprefix("exit "))
        return self.code

    def reach(self, condition: Callable[[], object]) -> bool:
        """Wait until the condition holds (True) or the process has ended (False)."""
        reached = False

        def over() -> bool:
            nonlocal reached
            reached = bool(condition())
            return reached or not self.running()

        return wait_for(over) and reached


def command(trial: Trial, *flags: str, prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
    """The trainer as a user starts it: `python -m trainer CONFIG.yaml`."""
    argv = [*prefix, sys.executable, "-m", "trainer", str(trial.file), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    return subprocess.Popen(argv, cwd=REPOSITORY, **{**pipes, **options})


def wait_for(condition: Callable[[], object], seconds: float = DEADLINE_S, every: float = 0.002) -> bool:
    """Wait until the condition holds; fails after so long. every: seconds between looks; more where a look costs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(every)
    return True


def assert_same_run(trial: Trial, reference: Trial, *, more: frozenset[str] = frozenset()) -> None:
    """The same weights, bit for bit, after the same tasks in the same order, each trained once.

    `more`: persistent checkpoints that the trial has beside the reference's.
    """
    assert trial.summary()["parameter_sha256"] == reference.summary()["parameter_sha256"]
    assert {name: data for name, data in trial.weights().items() if name not in more} == reference.weights()
    tasks = trial.trained_tasks()
    assert tasks == reference.trained_tasks()
    assert len(set(tasks)) == len(tasks) == trial.config.rollout.batch_size * trial.summary()["global_step"]
