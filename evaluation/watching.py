"""`python -m evaluation.watching CONFIG.yaml`: score every checkpoint of a folder as it appears.

`clusterkit eval --cluster --watch` runs it as a job of the cluster; each evaluation is a process of its own. It ends
when the run is complete and all of its checkpoints are scored, or on a signal. Evaluations that need GPUs are tasks of
Ray, so that no GPU is held while there is nothing to score. Prints a line of JSON for every event of a checkpoint; what
it prints, and what such tasks print, goes into the file CONFIG.log.

Exit codes: 0 all scored, 1 some were not, 2 bad configuration, 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from evaluation.config import EvalConfig, WatchConfig
from evaluation.steps import checkpoints_in
from trainer.configfile import read_config
from trainer.entry import run_command
from trainer.errors import InterruptedRunError
from trainer.files import last_records
from trainer.signals import StopFlag

LOOK_SECONDS = 5.0
POLL_SECONDS = 0.2
EVENT = "watch"


def watch(
    folder: Path,
    score: Callable[[Path], int],
    stop: Callable[[], bool],
    print_event: Callable[..., None],
    complete: Callable[[], bool],
) -> tuple[int, list[str]]:
    """Score the checkpoints that are there, oldest first, then those that appear.

    One that is replaced, as by a run that went back and does its steps again, is scored again.

    Args:
        folder: that they are in, at whatever depth.
        score: runs the evaluation of a checkpoint; returns its exit code.
        print_event: gets every event of a checkpoint, as names and values.
        complete: whether no more checkpoints will come.

    Returns:
        How many scores are there, and the names of the checkpoints that have none.

    Raises:
        InterruptedRunError: `stop` said so.
    """
    done: dict[Path, int] = {}
    failed: dict[Path, str] = {}
    while True:
        is_last = complete()  # looked at first: its last checkpoint is there then
        found = {path: stamp for path in checkpoints_in(folder) if (stamp := _stamp(path)) is not None}
        fresh = [path for path, stamp in found.items() if done.get(path) != stamp]
        for checkpoint in fresh:
            done[checkpoint] = found[checkpoint]
            failed.pop(checkpoint, None)
            print_event(event="scoring", checkpoint=str(checkpoint))
            code = score(checkpoint)
            if stop():
                raise InterruptedRunError("interrupted: what is answered is written; the same command goes on")
            if code:
                failed[checkpoint] = checkpoint.name
            print_event(event="scored" if code == 0 else "failed", checkpoint=str(checkpoint), code=code)
        if is_last and not fresh:
            print_event(event="ended", scored=len(done) - len(failed), failed=list(failed.values()))
            return len(done) - len(failed), list(failed.values())
        end = time.monotonic() + (0.0 if fresh else LOOK_SECONDS)
        while time.monotonic() < end:
            if stop():
                raise InterruptedRunError("interrupted while waiting for a checkpoint; the same command goes on")
            time.sleep(POLL_SECONDS)


def _stamp(checkpoint: Path) -> int | None:
    """What tells a checkpoint from another one of its name; None while it is replaced.

    That is a time alone: over sshfs or a bucket's mount a file's inode number changes while the file does not.
    """
    try:
        return (checkpoint / "config.json").stat().st_mtime_ns
    except OSError:
        return None


def is_complete(run_logs: str) -> bool:
    """Whether the run of this log folder is complete."""
    records = last_records(Path(run_logs, "metrics.jsonl")) if run_logs else []
    return bool(records) and (records[-1].get("kind"), records[-1].get("status")) == ("finish", "completed")


def _request(evaluation: EvalConfig, checkpoint: Path, logs: Path) -> Path:
    """Write the configuration of a checkpoint's evaluation; returns its path."""
    config = evaluation.model_copy(update={"model_path": str(checkpoint)})
    path = logs / f"{checkpoint.name}.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run_evaluation(request: str, stop: Callable[[], bool]) -> int:
    """Run one evaluation in a process of its own, with our output; returns its exit code."""
    process = subprocess.Popen([sys.executable, "-m", "evaluation", request])
    stopping = False
    try:
        while process.poll() is None:
            if stop() and not stopping:
                stopping = True
                process.terminate()
            time.sleep(POLL_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return int(process.returncode)


def on_gpus(request: str, log: str) -> int:
    """As `run_evaluation`, on the node where Ray has placed this task; prints into the job's log."""
    with Path(log).open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    return run_evaluation(request, lambda: False)


def scored_by_ray(gpus: int, log: Path, stop: StopFlag, print_event: Callable[..., None]) -> Callable[[str], int]:
    """Make a function that runs an evaluation on `gpus` GPUs of one host, once Ray has them free."""
    import ray  # noqa: PLC0415 (only where evaluations want GPUs)

    ray.init(address="auto", logging_level=logging.WARNING, log_to_driver=False)
    stop.install()  # Ray has put handlers of its own in place, which end the process at once
    task: Any = ray.remote(num_cpus=0, num_gpus=gpus, max_retries=0)(on_gpus)

    def run(request: str) -> int:
        reference = task.remote(request, str(log))
        stopping = False
        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            if stop() and not stopping:
                stopping = True
                ray.cancel(reference)
        try:
            return int(ray.get(reference))
        except ray.exceptions.RayError as error:
            if not stop():
                print_event(event="lost", reason=str(error).strip().splitlines()[-1][:500])
            return 1

    return run


def print_event(**values: object) -> None:
    """Print what became of a checkpoint."""
    print(json.dumps({EVENT: values.pop("event"), **values}), flush=True)


def main() -> int:
    """Entry point; returns the exit code."""
    return run_command("python -m evaluation.watching", __doc__, _watch)


def _watch(path: Path, stop: StopFlag) -> int:
    config = read_config(path, WatchConfig)
    logs = Path(config.evaluation.output_path) / "logs" / "watch"
    logs.mkdir(parents=True, exist_ok=True)
    if gpus := config.evaluation.server.gpus:
        run = scored_by_ray(gpus, path.with_suffix(".log"), stop, print_event)
    else:
        run = lambda request: run_evaluation(request, stop)  # noqa: E731

    def score(checkpoint: Path) -> int:
        return run(str(_request(config.evaluation, checkpoint, logs)))

    complete = lambda: config.once or is_complete(config.run_logs)  # noqa: E731
    _, failed = watch(Path(config.folder), score, stop, print_event, complete)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
