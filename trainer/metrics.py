"""Output of a run: log lines in AReaL v0.2's shape, metrics.jsonl with every number, TensorBoard, W&B.

The formats are an interface (docs/run-directory.md): people and scripts search for them.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from trainer.config import RunConfig
from trainer.disk import naming
from trainer.files import is_torn
from trainer.machine import Usage

log = logging.getLogger("trainer")

SPEEDS = ("tokens_per_s", "step_time_s")
"""Numbers of a step that stand beside its statistics, and among them in plots."""


def open_log(path: Path) -> None:
    """Send the trainer's log to `path` (appended), with AReaL's time stamp and no colour."""
    handler = log_file(path)
    root = logging.getLogger("trainer")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def log_file(path: Path) -> logging.Handler:
    """A handler that appends to `path` in the form of `open_log`."""
    handler = _LogFile(path)
    handler.setFormatter(_AReaLFormatter())
    return handler


class _LogFile(logging.Handler):
    """Appends lines, each in one write. A full disk is no error here: metrics.jsonl reports it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._file.write((self.format(record) + "\n").encode())

    def close(self) -> None:
        self._file.close()
        super().close()


class _AReaLFormatter(logging.Formatter):
    """`20250222-11:11:56.997 master worker INFO: message`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y%m%d-%H:%M:%S", time.localtime(record.created))
        return f"{stamp}.{int(record.msecs):03d} master worker {record.levelname}: {record.getMessage()}"


def step_scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a `step` record by the names that they have in TensorBoard, W&B and the report."""
    speed: dict[str, Any] = {name: record[name] for name in SPEEDS if name in record}
    times, machine = _named("time", record.get("timings")), _named("machine", record.get("machine"))
    return {**_mapping(record.get("stats")), **speed, **times, **machine}


def eval_scalars(record: dict[str, Any]) -> dict[str, Any]:
    """Return the same of an `eval` record."""
    own = ("accuracy", "sampled_accuracy", "loss", "perplexity")
    return _named("eval", {**_mapping(record.get("metrics")), **{name: record[name] for name in own if name in record}})


def _named(prefix: str, values: object) -> dict[str, Any]:
    """Return scalars under a prefix, as TensorBoard groups them."""
    return {f"{prefix}/{name}": value for name, value in _mapping(values).items()}


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class Sink(Protocol):
    """A further destination of scalars."""

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Record values at a global step."""

    def close(self) -> None:
        """Flush and close."""


class Monitor:
    """Writes a run's log lines and numbers. With `folder` None, on all ranks but 0, it writes nothing."""

    def __init__(self, folder: Path | None, attempt: int, sinks: list[Sink] | None = None) -> None:
        self.attempt = attempt
        self.sinks = sinks or []
        self._lock = Lock()
        self._usage = None if folder is None else Usage()
        self._file = None if folder is None else (folder / "metrics.jsonl").open("ab", buffering=0)
        if self._file is not None and is_torn(Path(str(self._file.name))):
            _append(self._file, b"\n")  # else the next record would be of that line

    def record(self, kind: str, **fields: Any) -> None:
        """Append one record; it is in the file, whole, when this returns.

        Raises:
            OSError: it cannot be written (the disk is full); nothing of it is in the file.
        """
        if self._file is None:
            return
        with self._lock:  # checkpoints are recorded by the thread that writes them
            line = {"kind": kind, "time": round(time.time(), 3), "attempt": self.attempt, **fields}
            _append(self._file, (json.dumps(_finite(line)) + "\n").encode())

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Send values to all sinks. A sink that fails is dropped: a plot is not worth a run."""
        for sink in list(self.sinks):
            try:
                sink.scalars(values, step)
            except Exception as error:
                self.sinks.remove(sink)
                self.warn(f"{type(sink).__name__.strip('_')} gets no more numbers: {type(error).__name__}: {error}")

    def usage(self) -> dict[str, float]:
        """How busy this machine was since the last call; see `Usage.take`."""
        return self._usage.take() if self._usage is not None else {}

    def info(self, message: str) -> None:
        """A line in main.log."""
        if self._file is not None:
            log.info(message)

    def warn(self, message: str) -> None:
        """A line in main.log and a record that `clusterkit` shows."""
        if self._file is not None:
            log.warning(message)
        self.record("warning", message=message)

    def close(self) -> None:
        """Flush everything."""
        if self._usage is not None:
            self._usage.close()
        for sink in self.sinks:
            with suppress(Exception):
                sink.close()
        if self._file is not None:
            self._file.close()


def _append(file: FileIO, data: bytes) -> None:
    """Write all of `data` at the end of `file`, or nothing."""
    before = os.fstat(file.fileno()).st_size
    with naming(Path(str(file.name))):
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(before)
            raise


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become strings."""
    if isinstance(value, float) and value - value != 0:
        return repr(value)
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def epoch_line(position: dict[str, int], tokens: int, seconds: float, total: float, remaining: float | None) -> str:
    """AReaL's line for a finished step; `position` has the fields of the `step` record."""
    p = position
    line = (
        f"Epoch {p['epoch']}/{p['epochs']} step {p['epoch_step']}/{p['steps_per_epoch']} "
        f"(global step {p['global_step']}) finishes. Average #tokens per batch is {tokens}. "
        f"#End to end# execution time: *{seconds:.3f}*s. Total time consumption: {total:.3f}s. "
    )
    return line + (f"Estimated remaining time: {remaining:.3f}s. " if remaining is not None else "")


def stats_line(stats: dict[str, float]) -> str:
    """AReaL's line with the statistics of a training step."""
    return f"RPC name actor_train returns {stats!r}"


def make_sinks(config: RunConfig, folder: Path) -> list[Sink]:
    """TensorBoard and W&B as configured. A missing package or key is logged, and costs nothing but the plot."""
    sinks: list[Sink] = []
    if config.monitor.tensorboard:
        try:
            sinks.append(_TensorBoard(folder / "tensorboard"))
        except ImportError:
            log.warning("tensorboard is not installed: no event files (pip install 'clusterkit[train]')")
    if config.monitor.wandb != "disabled":
        if config.monitor.wandb == "online" and not os.environ.get("WANDB_API_KEY"):
            log.warning("monitor.wandb=online but WANDB_API_KEY is not set in the environment: logging offline")
        try:
            sinks.append(_WandB(config, folder))
        except ImportError:
            log.warning("wandb is not installed: nothing is sent there (pip install 'clusterkit[wandb]')")
    return sinks


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (slow to import, optional)

        self.writer = SummaryWriter(str(folder))

    def scalars(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WandB:
    """The key comes from WANDB_API_KEY, which wandb reads itself; the configuration that is sent holds no secret."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        import wandb  # noqa: PLC0415 (optional)

        online = config.monitor.wandb == "online" and bool(os.environ.get("WANDB_API_KEY"))
        self.run = wandb.init(
            project=config.monitor.wandb_project,
            name=f"{config.experiment_name}/{config.trial_name}",
            id=f"{config.experiment_name}-{config.trial_name}",
            resume="allow",
            mode="online" if online else "offline",
            dir=str(folder),
            config=config.model_dump(mode="json"),
        )

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()
