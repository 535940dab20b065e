"""Several ranks on this machine: a process each, signals passed on, their exit codes turned into one outcome."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.errors import CrashError, InterruptedRunError, RunError, UserError
from trainer.launch.rank_job import RankJob, start_rank
from trainer.signals import StopFlag
from trainer.staging import temporary_folder

log = logging.getLogger("trainer")

GRACE_SECONDS = 15.0
"""How long the other ranks may take to notice that one has failed; then they are killed."""
LOST_SECONDS = 3.0
"""The same where one was lost: they can tell nothing of that, and on GPUs they wait for it until they are killed."""
POLL_SECONDS = 0.1
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Signals that end a process which went wrong outside of Python."""


class RankedRun:
    """An attempt by `config.ranks` processes. `global_step`: the last finished step, as far as rank 0 reported it."""

    def __init__(self, config: RunConfig, folder: Path, attempt: int, stop: StopFlag, start: Start) -> None:
        self.config, self.folder, self.attempt, self.stop, self.start = config, folder, attempt, stop, start
        self.global_step = start.global_step

    def run(self) -> None:
        """Train to the end. Raises UserError: as rank 0 raised it. RunError: a rank was lost."""
        with temporary_folder("ranks") as meeting:
            job = RankJob(self.config, self.folder, self.attempt, self.start, meeting, f"file://{meeting}/rendezvous")
            ranks = [start_rank(rank, job) for rank in range(self.config.ranks)]
            codes = _wait(ranks, self.stop)
            self.global_step = last_step(meeting, self.global_step)
            conclude(meeting, codes, len(ranks))


def _wait(ranks: Sequence[subprocess.Popen[bytes]], stop: StopFlag) -> dict[int, int]:
    """Exit codes, by rank, of the ranks that failed before the others were killed.

    The others cannot finish a collective without them, so they get GRACE_SECONDS, or LOST_SECONDS.
    """
    forwarded = False
    failed: dict[int, int] = {}
    give_up = math.inf
    while True:
        running = [process for process in ranks if process.poll() is None]
        failed |= {rank: p.returncode for rank, p in enumerate(ranks) if p.returncode and rank not in failed}
        if not running:
            return failed
        if stop() and not forwarded:
            forwarded = True
            for process in running:
                process.terminate()
        give_up = min(give_up, time.monotonic() + patience(failed))
        if time.monotonic() > give_up:
            for process in running:
                process.kill()
            for process in running:  # freeing a GPU's memory takes seconds, on all at once
                process.wait()
            return failed
        time.sleep(POLL_SECONDS)


def patience(failed: dict[int, int], lost: bool = False) -> float:
    """Seconds until the other ranks are killed; endless where none has failed.

    Args:
        failed: exit codes by rank.
        lost: whether a rank's node was lost.
    """
    if lost or any(code < 0 for code in failed.values()):
        return LOST_SECONDS
    return GRACE_SECONDS if failed else math.inf


def last_step(meeting: Path, otherwise: int) -> int:
    """The last finished step that rank 0 has left in `meeting`; `otherwise` where it has left none."""
    return int(_outcome(meeting).get("global_step", otherwise))


def conclude(meeting: Path, codes: dict[int, int], size: int) -> None:
    """Turn the exit codes of failed ranks, and the files that they have left, into one outcome.

    Args:
        meeting: folder with the ranks' files.
        codes: exit codes by rank; none: nothing failed.

    Raises:
        UserError: as rank 0 raised it.
        RunError: another rank has found a disk full.
        CrashError: as rank 0 raised it, or a rank was lost.
    """
    if not codes:
        return
    outcome = _outcome(meeting)
    faults = {rank: text for rank in codes if (text := _read(meeting / f"fault-{rank}"))}
    crashes = {rank: text for rank in codes if (text := _read(meeting / f"fatal-{rank}"))}
    for rank, text in (*crashes.items(), *faults.items()):
        log.error("rank %d:\n%s", rank, text)
    if outcome.get("message"):
        if outcome.get("crashed"):
            raise CrashError(outcome["message"])
        error = {e.exit_code: e for e in (InterruptedRunError, RunError)}.get(outcome["exit_code"], UserError)
        raise error(outcome["message"])
    if full := next(filter(None, (_read(meeting / f"full-{rank}") for rank in codes)), ""):
        raise RunError(full)
    raise CrashError(f"{_cause(codes, faults, size)}; the same command goes on from the last recover checkpoint")


def _cause(codes: dict[int, int], faults: dict[int, str], size: int) -> str:
    """The cause of the failure: a rank that was killed comes first, since others fail when its connections break."""
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
    """Rank 0's last step, and the message that it ended with."""
    text = _read(meeting / "outcome")
    return json.loads(text) if text else {}


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
