"""Rows of examples, made while the step before is trained.

Beside a GPU processes make them: a thread of the trainer's own takes Python's lock from the thread that launches
kernels, which then waits for as long as the rows take. Training on a CPU hardly needs the lock, and a thread is enough.
"""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.errors import CrashError
from trainer.sft.encoding import Encoder
from trainer.signals import SIGNALS
from trainer.tasks.examples import Example
from trainer.types import Row

MOST_PROCESSES = 4
END_SECONDS = 5.0
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of examples, and what was left out of them.

    longest: tokens of the longest row, left out or not. long_memories, misfits, misfit: see `Encoder`.
    """

    rows: list[Row]
    too_long: int
    longest: int
    long_memories: int
    misfits: int
    misfit: str

    @property
    def left_out(self) -> int:
        """Answers and whole traces."""
        return self.too_long + self.long_memories + self.misfits


@dataclass(frozen=True, slots=True)
class Part:
    """Examples of a step. first: number of the first one in its step. longest: most tokens of a row that is kept."""

    examples: Sequence[Example]
    first: int
    longest: int


def make(encoder: Encoder, part: Part) -> Encoded:
    """The rows of a part, in order."""
    encoder.misfit = ""
    long_memories, misfits = encoder.long_memories, encoder.misfits
    rows = [row for number, one in enumerate(part.examples, part.first) for row in encoder.rows(one, number)]
    kept = [row for row in rows if row.num_tokens <= part.longest]
    return Encoded(
        kept,
        too_long=len(rows) - len(kept),
        longest=max((row.num_tokens for row in rows), default=0),
        long_memories=encoder.long_memories - long_memories,
        misfits=encoder.misfits - misfits,
        misfit=encoder.misfit,
    )


class Making:
    """Rows that are being made."""

    def __init__(self, parts: list[Future[Encoded]]) -> None:
        self._parts = parts

    @property
    def done(self) -> bool:
        """Whether `result` has nothing to wait for."""
        return all(part.done() for part in self._parts)

    def result(self) -> Encoded:
        """Wait for them. Raises what making them raised."""
        parts = [part.result() for part in self._parts]
        return Encoded(
            [row for part in parts for row in part.rows],
            too_long=sum(part.too_long for part in parts),
            longest=max((part.longest for part in parts), default=0),
            long_memories=sum(part.long_memories for part in parts),
            misfits=sum(part.misfits for part in parts),
            misfit=next((part.misfit for part in parts if part.misfit), ""),
        )


class RowMaker:
    """Makes rows of examples.

    Args:
        tokenizer: is copied, for no two threads may use one at a time.
        processes: that make them; 0: a thread of this one does. See `processes_of`.

    Raises:
        UserError: see `Encoder`.
    """

    def __init__(self, config: RunConfig, tokenizer: Any, processes: int = 0) -> None:
        self._encoder = Encoder(config, copy.deepcopy(tokenizer))  # raises here, not in a process
        self._size = max(1, processes)
        self._processes = [_Process(config, tokenizer) for _ in range(processes)]
        self._idle = list(self._processes)
        self._pool = ThreadPoolExecutor(self._size, "rows")

    def begin(self, examples: Sequence[Example], longest: int) -> Making:
        """Have the rows of examples made, in their order; those of more than `longest` tokens are left out."""
        size = max(1, -(-len(examples) // self._size))
        starts = range(0, len(examples), size)
        parts = [Part(examples[first : first + size], first, longest) for first in starts]
        return Making([self._pool.submit(self._make, part) for part in parts])

    def close(self) -> None:
        """Make no more."""
        for process in self._processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

    def _make(self, part: Part) -> Encoded:
        if not self._processes:
            return make(self._encoder, part)
        process = self._idle.pop()  # there are as many as threads
        try:
            return process.make(part)
        finally:
            self._idle.append(process)


def processes_of(config: RunConfig) -> int:
    """One for every four cores that a rank has, MOST_PROCESSES at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores // (4 * config.ranks)))


class _Process:
    """A process that makes rows, used by one thread at a time; it starts while others do something else."""

    def __init__(self, config: RunConfig, tokenizer: Any) -> None:
        self._pipe, child = Pipe()
        command = [sys.executable, "-P", "-m", "trainer.sft.row_process", str(child.fileno())]
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        # A signal to all processes of a run is for the trainer, which ends this one itself: it stays blocked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(child.fileno(),), env={**os.environ, "PYTHONPATH": path}
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            child.close()
        self._begun, self._first = False, pickle.dumps((config, tokenizer))

    def make(self, part: Part) -> Encoded:
        """See `make`. Raises CrashError where the process has ended."""
        if not self._begun:
            self._ask(self._first)
            self._begun = True
        found = self._ask(pickle.dumps(part))
        assert isinstance(found, Encoded)
        return found

    def _ask(self, data: bytes) -> Encoded | None:
        try:
            self._pipe.send_bytes(data)
            answer = self._pipe.recv_bytes()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            code = self._process.poll() or 0
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise CrashError(
                f"a process that makes rows of examples {how}: did the machine run out of memory?"
            ) from None
        found: Encoded | Exception | None = pickle.loads(answer)
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close its pipe, which no thread uses any more."""
        self._pipe.close()
