"""Grading in processes that can be killed: no answer of a model can stop, slow down or end an evaluation."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from trainer.errors import RunError
from trainer.grading import Verdict

MEMORY_BYTES = 4 << 30
WALL_FACTOR, WALL_SECONDS = 10.0, 30.0
"""A worker that neither answers nor uses CPU time is ended after WALL_FACTOR deadlines and WALL_SECONDS."""
START_SECONDS = 300.0
MOST_ANSWERS = 2000
"""Of a worker, before another takes its place: what SymPy and ANTLR remember takes up to 40 KB an answer, for ever."""
_ROOT = Path(__file__).parents[2]


class GradingPool:
    """Worker processes that compare mathematical answers.

    Args:
        workers: how many at a time. deadline: CPU seconds of one comparison; beyond it the answer is wrong, whatever
            else the machine has to do meanwhile. percent_lenient: see `trainer.grading.mathematics.judge`.
    """

    def __init__(self, workers: int = 2, deadline: float = 5.0, percent_lenient: bool = False) -> None:
        self.deadline, self.percent_lenient = deadline, percent_lenient
        self._threads = ThreadPoolExecutor(workers, "grading")
        self._local = threading.local()
        self._all: list[_Worker] = []
        self._closed = False

    def submit(self, truths: Sequence[str], answer: str) -> Future[Verdict]:
        """Have an answer compared with the true ones. The future raises RunError where no worker can be started."""
        return self._threads.submit(self._judge, list(truths), answer)

    def close(self) -> None:
        """End the workers; what was not begun yet is given up."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in tuple(self._all):  # threads may be replacing theirs
            worker.kill()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, truths: list[str], answer: str) -> Verdict:
        item = {"truths": truths, "answer": answer, "lenient": self.percent_lenient}
        verdict = self._worker().ask(item)
        if verdict is None and not self._closed:  # the machine has ended it or held it up: no word on the answer
            verdict = self._worker().ask(item)
        return verdict or Verdict(False, "gave up: the worker that compares was lost, and so was the one after it")

    def _worker(self) -> _Worker:
        """This thread's worker: a new one where it has ended or has compared MOST_ANSWERS."""
        worker: _Worker | None = getattr(self._local, "worker", None)
        if worker is not None and worker.alive and worker.asked < MOST_ANSWERS:
            return worker
        if worker is not None:
            worker.kill()
            self._all.remove(worker)
            self._local.worker = None  # the next one may not start
        worker = _Worker(self.deadline)
        self._local.worker = worker
        self._all.append(worker)
        if self._closed:
            worker.kill()
        return worker


class _Worker:
    """One process, used by one thread."""

    def __init__(self, deadline: float) -> None:
        self.deadline, self.asked = deadline, 0
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.grading.mathematics", str(deadline), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        self._left = b""
        if self._line(START_SECONDS) != "ready":
            self.kill()
            assert self._process.stderr is not None
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            raise RunError(
                f"the grading worker does not start: {lines[-1] if lines else 'it said nothing'}. Is math-verify "
                "installed? pip install 'clusterkit[eval]'"
            )
        # Nobody reads what libraries complain about; a full pipe would stop the worker.
        assert self._process.stderr is not None
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, item: dict[str, object]) -> Verdict | None:
        """The worker's verdict; an answer that takes too long is "wrong", and ends the worker.

        None where the worker was lost in another way: killed, or held up without using CPU time.
        """
        assert self._process.stdin is not None
        self.asked += 1
        try:
            self._process.stdin.write(json.dumps(item).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(WALL_FACTOR * self.deadline + WALL_SECONDS)
        except BrokenPipeError:
            line = ""
        if not line:
            self.kill()
            late = self._process.returncode == -signal.SIGPROF
            return Verdict(False, f"gave up: comparing takes more than {self.deadline:g} s") if late else None
        found = json.loads(line)
        if found["reason"].startswith("gave up"):
            self.asked = MOST_ANSWERS  # what it holds of its memory the next answer may need
        return Verdict(bool(found["right"]), str(found["reason"]))

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> str:
        """The next line of output; empty when it has ended or does not come within so many seconds."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._left:
                if not selector.select(seconds):
                    return ""
                data = os.read(descriptor, 65536)
                if not data:
                    return ""
                self._left += data
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()
