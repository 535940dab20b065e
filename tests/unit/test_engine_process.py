"""Servers as child processes: real processes that work, fail to start, hang or are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainer.engines.http import Server
from trainer.engines.launching import launch, tie
from trainer.engines.options import ServerOptions
from trainer.engines.process import ServerCommand, ServerProcess, ServerStartError, free_port, log_cause

REPOSITORY = Path(__file__).parents[2]

SERVER = """
import http.server, subprocess, sys
port, child_file = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(child_file, "w").write(str(child.pid))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def python(tmp_path: Path, code: str, *arguments: str, grace: float = 2.0) -> ServerCommand:
    return ServerCommand("s0", (sys.executable, "-c", code, *arguments), tmp_path / "logs" / "s0.log", grace=grace)


def serving(tmp_path: Path) -> tuple[ServerProcess, Path]:
    port = free_port()
    process = ServerProcess(python(tmp_path, SERVER, str(port), str(tmp_path / "child"))).start()
    asyncio.run(process.wait_ready(f"http://127.0.0.1:{port}/health", 30))
    return process, tmp_path / "child"


def test_it_is_ready_when_it_answers_and_ends_with_all_it_started(tmp_path: Path) -> None:
    process, child = serving(tmp_path)
    family = [*psutil.Process(process.pid).children(recursive=True)]
    assert int(child.read_text()) in [p.pid for p in family]
    asyncio.run(process.stop())
    assert not process.running
    until(lambda: all(gone(p.pid) for p in family))


def test_the_death_of_the_server_is_noticed_at_once(tmp_path: Path) -> None:
    process, child = serving(tmp_path)
    noticed = threading.Event()
    process.on_end(noticed.set)
    (server,) = psutil.Process(process.pid).children()
    os.kill(server.pid, signal.SIGKILL)
    assert noticed.wait(5)
    assert "was ended by SIGKILL" in process.how_it_ended()
    until(lambda: gone(int(child.read_text())))
    late = threading.Event()
    process.on_end(late.set)
    assert late.is_set()


def test_a_server_whose_process_ends_is_used_no_more_and_the_end_is_the_reason(tmp_path: Path) -> None:
    process, _ = serving(tmp_path)
    server = Server("s0", "http://127.0.0.1:9")
    tie(server, process)
    server.discard("the connection failed")  # seen a moment before the end of the process
    os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
    until(lambda: "was ended by SIGKILL" in server.problem)


def test_a_start_that_fails_tells_the_cause_from_the_log(tmp_path: Path) -> None:
    code = "import sys; print('starting'); sys.exit('RuntimeError: the frobnicator is missing')"
    process = ServerProcess(python(tmp_path, code)).start()
    with pytest.raises(ServerStartError, match=r"s0 ended with exit code 1: RuntimeError: the frobnicator.*s0\.log"):
        asyncio.run(process.wait_ready("http://127.0.0.1:9/health", 30))


def test_the_cause_is_read_from_this_start_alone(tmp_path: Path) -> None:
    for text in ("ValueError: old trouble", "KeyError: new trouble"):
        process = ServerProcess(python(tmp_path, f"import sys; sys.exit({text!r})")).start()
        until(lambda process=process: not process.running)  # type: ignore[misc]
    assert "new trouble" in process.how_it_ended()
    assert "old trouble" not in process.log_text()


SHARING = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 20)
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
print(memory.name, flush=True)
time.sleep(600)
"""


def test_shared_memory_of_a_server_that_is_killed_goes_with_it(tmp_path: Path) -> None:
    process = ServerProcess(python(tmp_path, SHARING)).start()
    until(lambda: process.log_text().endswith("\n"))
    memory = Path("/dev/shm") / process.log_text().strip()
    assert memory.exists()

    os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
    until(lambda: not process.running)

    assert not memory.exists()


def test_a_log_that_has_grown_too_long_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engines.process.MOST_LOG_BYTES", 4000)
    monkeypatch.setattr("trainer.engines.process.LOG_LOOK_SECONDS", 0.02)
    old, log = tmp_path / "logs" / "s0.log.old", tmp_path / "logs" / "s0.log"
    lines = "import sys\nprint('x' * 5000, flush=True)\nsys.stdin = open(sys.argv[1])\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = ServerProcess(python(tmp_path, f"{lines}sys.exit(sys.stdin.readline())", str(pipe))).start()
    until(lambda: old.exists() and not log.stat().st_size)

    pipe.write_text("ValueError: the end")
    until(lambda: not process.running)

    assert old.read_text() == "x" * 5000 + "\n"
    assert "ValueError: the end" in process.how_it_ended()


def test_a_log_begins_anew_where_there_is_no_room_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.engines.process.MOST_LOG_BYTES", 4000)
    monkeypatch.setattr("trainer.engines.process.LOG_LOOK_SECONDS", 0.02)
    old, log = tmp_path / "logs" / "s0.log.old", tmp_path / "logs" / "s0.log"
    log.parent.mkdir()
    old.symlink_to("/dev/full")
    process = ServerProcess(python(tmp_path, "import time; print('x' * 5000, flush=True); time.sleep(600)")).start()
    try:
        until(lambda: not old.is_symlink() and not log.stat().st_size)
    finally:
        asyncio.run(process.stop())

    assert not old.exists()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = ServerProcess(ServerCommand("s0", ("/nowhere/python",), tmp_path / "s0.log")).start()
    with pytest.raises(ServerStartError, match="cannot start /nowhere/python: No such file"):
        asyncio.run(process.wait_ready("http://127.0.0.1:9/health", 30))


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ServerStartError, match="cannot write its log"):
        ServerProcess(python(tmp_path, "")).start()


def test_a_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    process = ServerProcess(python(tmp_path, "import time; print('loading', flush=True); time.sleep(600)")).start()
    with pytest.raises(
        ServerStartError, match=r"not ready after 1 s \(\S+ never answered\); its log ends with: loading"
    ):
        asyncio.run(process.wait_ready(f"http://127.0.0.1:{free_port()}/health", 1))
    assert not process.running


def test_a_server_deaf_to_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    process = ServerProcess(python(tmp_path, code, grace=0.3)).start()
    until(lambda: "deaf" in process.log_text())
    asyncio.run(process.stop())
    assert not process.running
    assert "was stopped" in process.how_it_ended()


SGLANG = """#!/bin/sh
while [ "$1" != --port ]; do [ $# != 0 ] || exit 0; shift; done
exec {python} -c "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)
from http.server import HTTPServer, SimpleHTTPRequestHandler
SimpleHTTPRequestHandler.do_GET = lambda self: (self.send_response(200), self.end_headers())
HTTPServer(('127.0.0.1', $2), SimpleHTTPRequestHandler).serve_forever()"
"""


def test_sglang_is_not_waited_for_until_it_looks_for_sigterm(tmp_path: Path) -> None:
    """It looks every five seconds, waits five more while a request is under way, and then kills its processes."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    (program := tmp_path / "python").write_text(SGLANG.format(python=sys.executable))
    program.chmod(0o755)

    async def started_and_stopped() -> float:
        _, process = await launch("sglang", ServerOptions(tmp_path, tmp_path / "log", python=str(program)))
        began = time.monotonic()
        await process.stop()
        return time.monotonic() - began

    assert asyncio.run(started_and_stopped()) < 4


@pytest.mark.parametrize("killed", ["trainer", "guard"])
def test_it_never_outlives_the_trainer_or_the_guard(tmp_path: Path, killed: str) -> None:
    trainer_code = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        from trainer.engines.process import ServerCommand, ServerProcess
        code = "import time; time.sleep(600)"
        command = ServerCommand("s0", (sys.executable, "-c", code), Path({str(tmp_path / "log")!r}), grace=1)
        print(ServerProcess(command).start().pid, flush=True)
        time.sleep(600)
    """)
    trainer = subprocess.Popen([sys.executable, "-c", trainer_code], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert trainer.stdout is not None
    with trainer:
        try:
            guard = psutil.Process(int(trainer.stdout.readline()))
            until(lambda: bool(guard.children()))
            (server,) = guard.children()
            until(lambda: not any("guard.py" in word for word in server.cmdline()))  # it has become the server
            (trainer if killed == "trainer" else guard).kill()
            until(lambda: gone(server.pid) and gone(guard.pid))
        finally:  # else a failure would wait for its end
            trainer.kill()


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ModuleNotFoundError: No module named 'sglang'", "SGLang is not installed"),
        ("ModuleNotFoundError: No module named 'vllm.v1.no-such'", "this version has no such module"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "lower the server's memory fraction",
        ),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "raise the server's memory"),
        (
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
            "port was taken",
        ),
        ("RuntimeError: Cannot find any model weights with `/m`", "the model folder holds no weights"),
        ("AssertionError: 9 is not divisible by 2", "do not divide"),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("RuntimeError: No CUDA GPUs are available", "too few GPUs"),
        (
            "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.",
            "sees no GPU",
        ),
        (
            "ValueError: Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less than desired GPU memory "
            "utilization (0.85, 67.2 GiB).",
            "the GPU's memory is full",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (131072), 7.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (3.1 GiB).",
            "lower servers.context_length",
        ),
        (
            "Value error, Total number of attention heads (9) must be divisible by tensor parallel size (2).",
            "do not divide by the tensor parallel size",
        ),
        (
            "Value error, User-specified max_model_len (100000) is greater than the derived max_model_len (4096).",
            "the model has a shorter context",
        ),
    ],
)
def test_known_causes_come_with_advice(line: str, advice: str) -> None:
    cause = log_cause(f"INFO: loading\nTraceback (most recent call last):\n  File x\n{line}\nINFO: shutting down\n")
    assert cause.startswith(line[:40])
    assert advice in cause
