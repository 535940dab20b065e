"""Several ranks on this machine: a process each, signals passed on, their exit codes turned into one outcome."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import InterruptedRunError, RunError, UserError
from trainer.loop import TrainingRun
from trainer.metrics import Monitor, make_sinks, open_log
from trainer.paths import RunPaths
from trainer.signals import SIGNALS, StopFlag
from trainer.train.distributed import World, join_world, leave_world

log = logging.getLogger("trainer")

GRACE_SECONDS = 15.0
"""So long the other ranks may take to notice that one has failed; then they are ended."""


def set_threads(config: RunConfig) -> None:
    """Fix the number of CPU threads: results are bit-identical only for the same number."""
    torch.set_num_threads(config.train.threads or max(1, (os.cpu_count() or 1) // config.train.ranks))
    torch.use_deterministic_algorithms(True, warn_only=True)


class RankedRun:
    """An attempt by `config.train.ranks` processes. `global_step`: the last finished step, as far as rank 0 told."""

    def __init__(self, config: RunConfig, folder: Path, attempt: int, stop: StopFlag, start: Start) -> None:
        self.config, self.folder, self.attempt, self.stop, self.start = config, folder, attempt, stop, start
        self.global_step = start.global_step

    def run(self) -> None:
        """Train to the end.

        Raises:
            UserError: as rank 0 raised it; RunError when a rank was lost.

        """
        context = get_context("spawn")
        with tempfile.TemporaryDirectory(prefix="clusterkit-") as name:
            meeting = Path(name)
            job = _Job(self.config, self.folder, self.attempt, self.start, meeting)
            ranks = [context.Process(target=_rank_main, args=(rank, job)) for rank in range(self.config.train.ranks)]
            with _signals_held():
                for process in ranks:
                    process.start()
            codes = _wait(ranks, self.stop)
            outcome = _outcome(meeting)
            faults = {rank: text for rank in codes if (text := _read(meeting / f"fault-{rank}"))}
        self.global_step = int(outcome.get("global_step", self.global_step))
        if not codes:
            return
        for rank, text in faults.items():
            log.error("rank %d:\n%s", rank, text)
        if outcome.get("message"):
            error = {e.exit_code: e for e in (InterruptedRunError, RunError)}.get(outcome["exit_code"], UserError)
            raise error(outcome["message"])
        raise RunError(
            f"{_cause(codes, faults, len(ranks))}; the same command goes on from the last recover checkpoint"
        )


def _wait(ranks: Sequence[BaseProcess], stop: StopFlag) -> dict[int, int]:
    """Exit codes, by rank, of those that failed of themselves. The others cannot finish a collective without them."""
    forwarded = False
    failed: dict[int, int] = {}
    give_up = float("inf")
    while any(process.is_alive() for process in ranks):
        next(process for process in ranks if process.is_alive()).join(0.1)
        if stop() and not forwarded:
            forwarded = True
            for process in ranks:
                process.terminate()
        _note(failed, ranks)
        if failed and give_up == float("inf"):
            give_up = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > give_up:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.join()
            return failed
    _note(failed, ranks)
    return failed


def _note(failed: dict[int, int], ranks: Sequence[BaseProcess]) -> None:
    for rank, process in enumerate(ranks):
        if process.exitcode:
            failed.setdefault(rank, process.exitcode)


def _cause(codes: dict[int, int], faults: dict[int, str], size: int) -> str:
    """What brought the ranks down: a killed one comes first, the others' broken connections follow from it."""
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    for rank, number in killed.items():
        often = " (often the kernel, out of memory)" if number == signal.SIGKILL else ""
        return f"rank {rank} of {size} was ended by signal {number}, {signal.Signals(number).name}{often}"
    rank = next((r for r in codes if r in faults), next(iter(codes)))
    last = faults[rank].strip().splitlines()[-1] if rank in faults else f"exit code {codes[rank]}"
    return f"rank {rank} of {size} failed: {last} (traceback in main.log)"


def _outcome(meeting: Path) -> dict[str, Any]:
    """What rank 0 left: its last step, and the message it ended with."""
    text = _read(meeting / "outcome")
    return json.loads(text) if text else {}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


@contextmanager
def _signals_held() -> Iterator[None]:
    """Children start with the signals held back, until they can take them: one that comes early is not lost."""
    resource_tracker.ensure_running()  # else the first child's start runs it, and that lets the signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class _Job:
    """What every rank is told. meeting: folder for the rendezvous and for what ranks leave to the parent."""

    config: RunConfig
    model_folder: Path
    attempt: int
    start: Start
    meeting: Path


def _rank_main(rank: int, job: _Job) -> None:
    """Body of one rank's process."""
    stop = StopFlag().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config, meeting = job.config, job.meeting
    logs = RunPaths.of(config).logs
    set_threads(config)
    main = rank == 0
    if main:
        open_log(logs / "main.log")
    monitor = Monitor(logs if main else None, job.attempt, make_sinks(config, logs) if main else [])
    world: World | None = None
    run: TrainingRun | None = None
    code, message = 0, ""
    try:
        world = join_world(rank, config.train.ranks, str(meeting / "rendezvous"))
        run = TrainingRun(config, job.model_folder, world, monitor, stop, job.start)
        run.run()
    except UserError as error:
        code, message = error.exit_code, str(error)
    except Exception:
        code = 1
        (meeting / f"fault-{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        monitor.close()
        if world is not None and not code:
            leave_world(world)
    if main:
        step = run.global_step if run else job.start.global_step
        outcome = {"global_step": step, "message": message, "exit_code": code}
        (meeting / "outcome").write_text(json.dumps(outcome), encoding="utf-8")
    # The process group of an abandoned run still has threads: the interpreter's own way out would end in a C++ abort.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """A rank must not outlive the process that holds the run's lock: it would write into the next attempt's files."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
