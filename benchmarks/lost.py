"""How long a run takes to go on after kill -9 of a server's processes, and of a rank, in the middle of a step.

    python3 benchmarks/lost.py TOKENIZER_FOLDER --allocation sglang:d2+fsdp:d2 [--shape 1.5B] [--documents 16]
    python3 benchmarks/lost.py TOKENIZER_FOLDER --shape tiny --engine vllm --documents 2 --group 2 --set train.ranks=2

The run and its options are those of benchmarks/memory_step.py (one case), with a recover checkpoint after every step.
After three steps all processes of the first server are killed, but not what watches over it; then the last rank. Killed
is at the third of the time that the step before took. Printed, a JSON object a line: steps as they are done; for each
loss the seconds from the kill to the end of the next step, those until what was lost was back, and how that compares
with an undisturbed step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory_step as base
import psutil
import yaml
from memory_step import Case

from trainer.serving import registry
from trainer.serving.keeper import end_hosts

EACH_STEP = ("checkpoint.ckpt_first_step=1", "checkpoint.ckpt_freq_steps=1", "recover_after=1")
STEPS_BEFORE = 3


class Watched:
    """A run of the trainer, started again where it ends, and what it has written."""

    def __init__(self, config: dict[str, Any], deadline: float) -> None:
        self.logs, self.deadline = base.logs_of(config), deadline
        self.logs.parent.mkdir(parents=True)
        self.file = self.logs.with_name(f"{self.logs.name}.yaml")
        self.file.write_text(yaml.safe_dump(config))
        self.steps: list[dict[str, Any]] = []
        self.starts = 0
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        paths = [str(base.ROOT), str(base.ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.starts += 1
        return subprocess.Popen([sys.executable, "-m", "trainer", str(self.file)], env=environment)

    def wait(self, there: Callable[[], bool]) -> float:
        """Seconds until something is there. Raises SystemExit after the deadline."""
        began = time.perf_counter()
        while not there():
            if time.perf_counter() > self.deadline:
                log = self.logs / "main.log"
                text = log.read_text()[-3000:] if log.exists() else ""
                raise SystemExit(f"out of time; the end of main.log:\n{text}")
            if self.process.poll() is not None:  # the same command goes on
                print(json.dumps({"the_run_ended_with": self.process.returncode}), flush=True)
                self.process = self.start()
            time.sleep(0.05)
        return time.perf_counter() - began

    def has_steps(self, count: int) -> Callable[[], bool]:
        def there() -> bool:
            self.steps += base.show_new(self.logs / "metrics.jsonl", len(self.steps))
            return len(self.steps) >= count

        return there

    def into_a_step(self) -> None:
        """Wait for a step to be under way for a third of its time."""
        time.sleep(self.steps[-1]["step_time_s"] / 3)

    def servers(self) -> list[registry.Registration]:
        return sorted(registry.read(registry.folder_of(self.logs)), key=lambda one: one.name)

    def ranks(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        found = sorted((p for p in children if "trainer.launch.rank" in " ".join(p.cmdline())), key=lambda p: p.pid)
        return found or [psutil.Process(self.process.pid)]


def lose(run: Watched, what: str, processes: list[psutil.Process], back: Callable[[], bool]) -> None:
    """Kill the processes, and tell how long it takes to go on."""
    usual, count = run.steps[-1]["step_time_s"], len(run.steps)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    began = time.perf_counter()
    run.wait(run.has_steps(count + 1))
    step = time.perf_counter() - began
    run.wait(back)
    told = {"lost": what, "processes": len(processes), "next_step_ended_after_s": round(step, 1)}
    told |= {"back_after_s": round(time.perf_counter() - began, 1), "step_before_s": round(usual, 1)}
    print(json.dumps({**told, "starts_of_the_run": run.starts}), flush=True)


def measure(given: argparse.Namespace, work: Path, deadline: float) -> None:
    case = Case(given.staleness[0], given.orders[0], given.sharing[0])
    config = base.settings(given, work / "model", work, case)
    run = Watched(config, deadline)
    try:
        run.wait(run.has_steps(STEPS_BEFORE))
        run.into_a_step()
        before = run.servers()[0]
        engine = psutil.Process(before.pid).children(recursive=True)

        def server_is_back() -> bool:
            now = run.servers()[0]
            return now.state == "ready" and (now.starts, now.pid) != (before.starts, before.pid)

        lose(run, "a server", engine, server_is_back)
        run.wait(run.has_steps(len(run.steps) + 1))
        run.into_a_step()
        ranks = run.ranks()
        lose(run, "a rank", ranks[-1:], lambda: len(run.ranks()) == len(ranks))
    finally:
        run.process.kill()
        run.process.wait()
        end_hosts(registry.folder_of(run.logs))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # servers are ended, also where a shell has them ignored
        signal.signal(number, signal.default_int_handler)
    given = base.parse(description=__doc__)
    if not Path(given.tokenizer).is_dir():
        raise SystemExit(f"{given.tokenizer}: no such folder; give one with an instruction model's tokenizer")
    given.settings = [*EACH_STEP, *given.settings]
    deadline = time.perf_counter() + given.seconds
    with tempfile.TemporaryDirectory(prefix="lost-") as name:
        work = Path(name)
        base.write_model(work / "model", given.shape, given.tokenizer, given.layers)
        measure(given, work, deadline)


if __name__ == "__main__":
    main()
