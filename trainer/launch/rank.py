"""`python -m trainer.launch.rank RANK`: one rank of an attempt, which joins the others and trains.

Whoever starts it writes its job to its standard input, and keeps that open: when it ends, so does the rank.
"""

from __future__ import annotations

import pickle
import signal
import sys

from trainer.entry import quick_imports
from trainer.launch.rank_job import RankJob
from trainer.signals import SIGNALS, StopFlag, end_with_input


def main(rank: int) -> None:
    """Take the job from standard input and run it."""
    stop = StopFlag().install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    given = sys.stdin.buffer
    job: RankJob = pickle.loads(given.read(int.from_bytes(given.read(8), "big")))
    end_with_input(signal.SIGKILL)  # a rank that is left behind would write into the next attempt's files
    with quick_imports():
        from trainer.launch.rank_run import rank_main  # noqa: PLC0415 (PyTorch)
    rank_main(rank, job, stop)


if __name__ == "__main__":
    main(int(sys.argv[1]))
