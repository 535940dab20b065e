"""An inference server as a child process: started, watched until it answers, ended with everything it started.

Why it did not start or died is read from its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trainer.errors import RunError

GUARD = Path(__file__).with_name("guard.py")
LOG_TAIL_BYTES = 64 * 1024
MOST_LOG_BYTES = 256 << 20
"""A log that has grown beyond this begins anew: servers write lines for every batch, for weeks."""
LOG_LOOK_SECONDS = 60.0
POLL_SECONDS = 0.2


class ServerStartError(RunError):
    """A server did not become ready. The message holds the cause from its log and the log's path."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What to start.

    name: of the server, in messages. argv: the command line. log: file for all its output (appended to).
    env: added to this process's environment. grace: seconds between SIGTERM and SIGKILL when it is stopped.
    """

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    grace: float = 5.0


class ServerProcess:
    """One running server. It never outlives the process that started it, not even one that is killed.

    The kernel ties it to the thread that calls `start`: call it from a thread that lives as long as the run does.
    """

    def __init__(self, command: ServerCommand) -> None:
        self.command = command
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._ended = threading.Event()
        self._stopping = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def start(self) -> ServerProcess:
        """Start the command. Raises ServerStartError when the log file cannot be written."""
        log = self.command.log
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            stream = log.open("ab")
        except OSError as error:
            raise ServerStartError(
                f"{self.command.name}: cannot write its log {log}: {error.strerror}. Make the folder writable"
            ) from error
        with stream:
            self._log_start = stream.tell()
            self._popen = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), str(os.getpid()), str(self.command.grace), *self.command.argv],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.command.env},
                start_new_session=True,  # Ctrl-C is for the trainer, which stops its servers itself
            )
        threading.Thread(target=self._watch, name=f"watch {self.command.name}", daemon=True).start()
        threading.Thread(target=self._bound_log, name=f"log of {self.command.name}", daemon=True).start()
        return self

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._popen is not None and not self._ended.is_set()

    @property
    def pid(self) -> int:
        """Process id of the guard, whose only child is the server."""
        return self._popen.pid if self._popen else 0

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call this, from a thread of its own, as soon as the server has ended; at once if it has already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def log_text(self) -> str:
        """The end of what this process has written to its log."""
        try:
            with self.command.log.open("rb") as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(self._log_start, size - LOG_TAIL_BYTES))
                return stream.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def how_it_ended(self) -> str:
        """One sentence: exit code or signal, the cause from the log, and where the log is."""
        if self._stopping:
            return f"was stopped (log: {self.command.log})"
        code = self._popen.returncode if self._popen else None
        what = "is running" if code is None else f"ended with exit code {code}"
        if code is not None and code > 128:
            with contextlib.suppress(ValueError):
                what = f"was ended by {signal.Signals(code - 128).name}"
        return f"{what}: {log_cause(self.log_text())} (log: {self.command.log})"

    async def wait_ready(self, url: str, seconds: float) -> None:
        """Return once GET `url` answers 200.

        Raises:
            ServerStartError: it ended, or did not answer within `seconds`; it has then been stopped.
        """
        deadline = time.monotonic() + seconds
        answer = "never answered"
        async with httpx.AsyncClient(timeout=min(5.0, seconds), trust_env=False) as client:
            while self.running:
                with contextlib.suppress(httpx.HTTPError):
                    code = (await client.get(url)).status_code
                    if code == httpx.codes.OK:
                        return
                    answer = f"answered {code}"
                if time.monotonic() > deadline:
                    end = log_end(self.log_text())
                    await self.stop()
                    raise ServerStartError(
                        f"{self.command.name} was not ready after {seconds:.0f} s ({url} {answer}); its log ends with: "
                        f"{end} (log: {self.command.log}). Raise start_seconds of the servers, or see the log for "
                        "what it waits for"
                    )
                await asyncio.sleep(POLL_SECONDS)
        raise ServerStartError(f"{self.command.name} {self.how_it_ended()}")

    async def stop(self) -> None:
        """End the server and everything it started; returns when it has ended."""
        if self._popen is None:
            return
        if not self._ended.is_set():
            self._stopping = True
            with contextlib.suppress(ProcessLookupError):
                self._popen.send_signal(signal.SIGCONT)  # were the guard stopped, it would not hear of the other
                self._popen.terminate()
        while not self._ended.is_set():
            await asyncio.sleep(0.02)

    def _watch(self) -> None:
        assert self._popen is not None
        self._popen.wait()
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _bound_log(self) -> None:
        """Begin the log anew where it has grown too long; what it held is in NAME.log.old, in place of what was there.

        The server appends to the same file all the time: a line between the two calls is lost. Where the disk has no
        room for a copy, all of it is.
        """
        log = self.command.log
        while not self._ended.wait(LOG_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                if log.stat().st_size > MOST_LOG_BYTES:
                    old = log.with_name(f"{log.name}.old")
                    try:
                        shutil.copyfile(log, old)
                    except OSError:  # the disk is full: half a copy would keep it so
                        old.unlink(missing_ok=True)
                    os.truncate(log, 0)
                    self._log_start = 0


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now; another program may still take it first."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


# What a log says, and what to do about it. The first that matches wins; more special ones stand first.
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"No module named '?sglang\b(?!\.)", "SGLang is not installed in this Python: install it beside the trainer"),
    (r"No module named '?vllm\b(?!\.)", "vLLM is not installed in this Python: pip install vllm"),
    (r"No module named '?(sglang|vllm)\.",
     "this version has no such module: check what the server's options name, or use a version that was tried"),
    (r"No module named '?([\w.]+)", "a Python package of the server is missing: install it beside the server"),
    (r"CUDA driver version is insufficient|driver on your system is too old",
     "the NVIDIA driver is older than the CUDA of this torch: update the driver, or install a torch for its CUDA"),
    (r"No accelerator \(CUDA", "the server sees no GPU: check nvidia-smi and the GPU numbers of the allocation"),
    (r"No CUDA GPUs are available|no CUDA-capable device|invalid device ordinal|Found no NVIDIA driver",
     "the server sees too few GPUs: check nvidia-smi, and that the allocation asks for no more GPUs than there are"),
    (r"no kernel image is available", "the server's kernels were not built for this GPU: install a build for it"),
    (r"larger than the available KV cache",
     "one whole context does not fit into the KV cache: lower servers.context_length, or raise the memory fraction"),
    (r"increase --mem-fraction-static|leave no GPU memory for the KV cache|No available memory for the cache blocks",
     "nothing is left for the KV cache: raise the server's memory fraction, or use more GPUs a server"),
    (r"less than desired GPU memory utilization|not enough GPU memory"
     r"|CUDA out of memory|OutOfMemoryError|CUDA error: out of memory",
     "the GPU's memory is full: lower the server's memory fraction, end what else uses the GPU, or take more GPUs"),
    (r"[Aa]ddress already in use", "the port was taken by another program: start again"),
    (r"Cannot find any model weights|no file named .*safetensors|No safetensors",
     "the model folder holds no weights: check the model path"),
    (r"does not appear to have a file named config\.json|Unrecognized model in|Incorrect path_or_model_id",
     "this is no model folder (config.json is missing or names no model type): check the model path"),
    (r"architectures .* (are|is) not supported|no SGLang implementation",
     "the server does not know this model architecture: use a newer server, or another model"),
    (r"max_model_len .*greater than the derived", "the model has a shorter context: lower servers.context_length"),
    (r"is not divisible by|must be divisible by tensor parallel|assert self\.total_num_(kv_)?heads % tp_size",
     "the model's heads do not divide by the tensor parallel size: use a size that divides them"),
    (r"unrecognized arguments|invalid choice",
     "this server does not know an option: use a version that was tried"),
    (r"ncclUnhandledCudaError|NCCL error", "NCCL failed between the server's GPUs: NCCL_DEBUG=INFO gives the reason"),
)  # fmt: skip
_ERROR_LINE = re.compile(r"^\s*(\w+\.)*\w*(Error|Exception|Exit)\b.*|.*\b(error|ERROR|Killed|Aborted)\b.*")


def log_cause(text: str) -> str:
    """One sentence: the line of the log that tells most, and what to do about it where that is known."""
    lines = _lines(text)
    if known := _known(lines):
        return known
    for line in reversed(lines):
        if _ERROR_LINE.match(line):
            return _short(line)
    return _short(lines[-1]) if lines else "its log is empty"


def log_end(text: str) -> str:
    """What a server that has not failed does, or waits for: a known line with advice, else the last ones of its log."""
    lines = _lines(text)
    return _known(lines) or " | ".join(map(_short, lines[-3:])) or "nothing, it is empty"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]


def _known(lines: list[str]) -> str:
    for pattern, advice in _KNOWN:
        expression = re.compile(pattern)
        for line in reversed(lines):
            if expression.search(line):
                return f"{_short(line)} — {advice}"
    return ""


def _short(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 1] + "…"
