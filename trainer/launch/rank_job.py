"""What a rank is given, and the start of its process. Without PyTorch: the actors of ranks on Ray need this."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainer.checkpoint.start import Start
from trainer.config import RunConfig
from trainer.signals import SIGNALS


@dataclass(frozen=True)
class RankJob:
    """What every rank of an attempt is given.

    config: the resolved configuration.
    model_folder: checkpoint that training starts from.
    attempt: number of the attempt.
    start: what to go on from.
    meeting: folder where ranks leave files for the process that started them.
    rendezvous: where the ranks meet, a URL of torch.distributed.
    gpu: number of the rank's GPU among those that it sees; None: all ranks are on one machine, and the servers may have
        its first GPUs.
    """

    config: RunConfig
    model_folder: Path
    attempt: int
    start: Start
    meeting: Path
    rendezvous: str
    gpu: int | None = None


def start_rank(rank: int, job: RankJob, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a rank on this machine; it ends with this one.

    Args:
        output: gets what it prints; None: what it prints goes where our own output goes.
    """
    # Signals are blocked in the rank until it can take them, so that one that comes during its imports is not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        safe = ["-P"] if sys.flags.safe_path else []  # as this process: no modules from the current folder
        command = [sys.executable, *safe, "-m", "trainer.launch.rank", str(rank)]
        error = None if output is None else subprocess.STDOUT
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=error)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    data = pickle.dumps(job)
    with suppress(BrokenPipeError):  # it has ended already; its exit code tells
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()
    return process
