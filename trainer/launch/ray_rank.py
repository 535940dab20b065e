"""`python -m trainer.launch.ray_rank RANK`: the process of one rank, which its actor starts on the rank's node.

Its job comes from standard input. It needs no Ray of its own.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

from trainer.launch.rank import RankJob, rank_main
from trainer.signals import SIGNALS, StopFlag


def _rank_process(rank: int) -> None:
    """Body of the rank's own process."""
    stop = StopFlag().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    told = sys.stdin.buffer
    job: RankJob = pickle.loads(told.read(int.from_bytes(told.read(8), "big")))
    threading.Thread(target=_end_with_actor, daemon=True).start()
    rank_main(rank, job, stop)


def _end_with_actor() -> None:
    """A rank must not outlive its actor: the next attempt would find it in its way."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _rank_process(int(sys.argv[1]))
