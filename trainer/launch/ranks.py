"""Several ranks on this machine: a process each, signals passed on, their exit codes turned into one outcome."""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import CrashError, InterruptedRunError, RunError, UserError
from trainer.launch.rank import RankJob, rank_main
from trainer.signals import SIGNALS, StopFlag

log = logging.getLogger("trainer")

GRACE_SECONDS = 15.0
"""So long the other ranks may take to notice that one has failed; then they are ended."""


CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""What ends a process that went wrong outside of Python."""


class RankedRun:
    """An attempt by `config.ranks` processes. `global_step`: the last finished step, as far as rank 0 told."""

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
            job = RankJob(self.config, self.folder, self.attempt, self.start, meeting, f"file://{meeting}/rendezvous")
            ranks = [context.Process(target=_rank_process, args=(rank, job)) for rank in range(self.config.ranks)]
            with _signals_held():
                for process in ranks:
                    process.start()
            codes = _wait(ranks, self.stop)
            self.global_step = last_step(meeting, self.global_step)
            conclude(meeting, codes, len(ranks))


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


def last_step(meeting: Path, otherwise: int) -> int:
    """The last finished step, as rank 0 has left it in `meeting`."""
    return int(_outcome(meeting).get("global_step", otherwise))


def conclude(meeting: Path, codes: dict[int, int], size: int) -> None:
    """Turn exit codes, by rank, of the ranks that failed, and what they have left in `meeting`, into one outcome.

    Raises:
        UserError: as rank 0 raised it; RunError when a rank was lost.

    """
    if not codes:
        return
    outcome = _outcome(meeting)
    faults = {rank: text for rank in codes if (text := _read(meeting / f"fault-{rank}"))}
    crashes = {rank: text for rank in codes if (text := _read(meeting / f"fatal-{rank}"))}
    for rank, text in (*crashes.items(), *faults.items()):
        log.error("rank %d:\n%s", rank, text)
    if outcome.get("message"):
        error = {e.exit_code: e for e in (InterruptedRunError, RunError)}.get(outcome["exit_code"], UserError)
        raise error(outcome["message"])
    raise CrashError(f"{_cause(codes, faults, size)}; the same command goes on from the last recover checkpoint")


def _cause(codes: dict[int, int], faults: dict[int, str], size: int) -> str:
    """What brought the ranks down: a killed one comes first, the others' broken connections follow from it."""
    killed = {rank: -code for rank, code in codes.items() if code < 0}
    for rank, number in killed.items():
        often = " (often the kernel, out of memory)" if number == signal.SIGKILL else ""
        if number in CRASHES:
            often = " (what each of its threads did is in main.log)"
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


def _rank_process(rank: int, job: RankJob) -> None:
    """Body of one rank's process."""
    stop = StopFlag().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank_main(rank, job, stop)


def _end_with_parent() -> None:
    """A rank must not outlive the process that holds the run's lock: it would write into the next attempt's files."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
