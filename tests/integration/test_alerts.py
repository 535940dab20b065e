"""Alerts, from a run's directory to a real HTTP server or a real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import run_clusterkit
from run_writer import RunWriter

from clusterkit.observe.alerts.delivery import Command, UndeliveredError, Webhook, deliver
from clusterkit.observe.alerts.watch import Watcher
from clusterkit.runs.directory import hold_lock

SECRET = "/services/T0/B1/tUlhQ5xNaV"
SOON = (0.01, 0.01, 0.01)


class Receiver:
    """A webhook on loopback. answers: status codes of the next requests; then 200."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answers: list[int] = []
        self.headers: dict[str, str] = {}
        self.got = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with receiver.got:
                    code = receiver.answers.pop(0) if receiver.answers else 200
                    receiver.paths.append(self.path)
                    if code == 200:
                        receiver.bodies.append(body)
                    receiver.got.notify_all()
                self.send_response(code)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}{SECRET}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def wait_for(self, count: int) -> None:
        with self.got:
            assert self.got.wait_for(lambda: len(self.bodies) >= count, timeout=60), self.bodies


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def said() -> list[str]:
    return []


def _failed(root: Path) -> RunWriter:
    writer = RunWriter(root).config().attempt().steps(1, 4).recover(3)
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB."
    writer.run.console(1).write_text(f"error: {message}\n")
    return writer.finish("failed", 4, message)


def _alerts(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_clusterkit("alerts", *arguments, env={**os.environ, **environment})


def test_a_failure_is_posted_once_with_its_diagnosis(tmp_path: Path, receiver: Receiver) -> None:
    _failed(tmp_path)
    first = _alerts("--once", "--fileroot", str(tmp_path), CLUSTERKIT_WEBHOOK=receiver.url)
    again = _alerts("--once", "--fileroot", str(tmp_path), CLUSTERKIT_WEBHOOK=receiver.url)
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    [body] = receiver.bodies
    assert (body["event"], body["experiment"], body["trial"]) == ("failed", "tiny-recall", "run1")
    assert (body["global_step"], body["total_steps"]) == (4, 30)
    assert "CUDA out of memory" in body["message"]
    assert "train.max_tokens_per_mb: 16384 → 8192" in body["text"]
    assert receiver.paths == [SECRET]


def test_the_address_is_a_secret(tmp_path: Path, receiver: Receiver) -> None:
    writer = _failed(tmp_path)
    receiver.answers = [403]
    file = tmp_path / "webhook"
    file.write_text(receiver.url + "\n")
    file.chmod(0o644)
    readable = _alerts("--once", "--fileroot", str(tmp_path), "--webhook", f"file:{file}")
    assert readable.returncode == 2
    assert "chmod 600" in readable.stderr
    file.chmod(0o600)
    refused = _alerts("--once", "--fileroot", str(tmp_path), "--webhook", f"file:{file}", "--debug")
    assert refused.returncode == 1
    assert "403" in refused.stderr
    sent = _alerts("--once", "--fileroot", str(tmp_path), "--webhook", f"file:{file}", "--debug")
    assert sent.returncode == 0
    typed = _alerts("--once", "--fileroot", str(tmp_path), "--webhook", receiver.url)
    assert typed.returncode == 2
    assert "file:PATH" in typed.stderr
    left = "".join(path.read_text() for path in writer.run.logs.rglob("*") if path.is_file())
    everything = left + "".join(p.stdout + p.stderr for p in (readable, refused, sent, typed))
    assert SECRET not in everything
    assert SECRET.rsplit("/", maxsplit=1)[1] not in everything


def test_what_fails_for_a_moment_is_tried_again_and_nothing_is_sent_twice(
    tmp_path: Path, receiver: Receiver, said: list[str]
) -> None:
    receiver.answers = [503, 429]
    watcher = Watcher(_failed(tmp_path).run, Webhook(receiver.url), said.append, SOON)
    assert watcher.look() == ("failed", True)
    assert len(receiver.paths) == 3
    assert watcher.look() == ("failed", True)
    assert len(receiver.bodies) == 1


def test_the_receiver_says_how_long_to_wait(receiver: Receiver) -> None:
    receiver.answers, receiver.headers = [429, 503], {"Retry-After": "7"}
    waited: list[float] = []
    deliver(Webhook(receiver.url), {"event": "failed"}, (1.0, 10.0), waited.append)
    assert waited == [7.0, 10.0]


def test_what_can_never_work_is_not_tried_again(receiver: Receiver) -> None:
    receiver.answers = [404]
    with pytest.raises(UndeliveredError, match="404"):
        deliver(Webhook(receiver.url), {"event": "failed"}, SOON)
    assert len(receiver.paths) == 1


def test_a_receiver_that_is_down_gets_it_at_a_later_look(tmp_path: Path, receiver: Receiver, said: list[str]) -> None:
    run = _failed(tmp_path).run
    receiver.server.shutdown()
    receiver.server.server_close()
    down = Watcher(run, Webhook(receiver.url), said.append, SOON)
    assert down.look() == ("failed", False)
    assert "cannot be reached" in said[-1]
    seen = tmp_path / "seen.json"
    up = Watcher(run, Command(("sh", "-c", f"cat > {seen}")), said.append, SOON)
    assert up.look() == ("failed", True)
    assert json.loads(seen.read_text())["event"] == "failed"


def test_each_stall_is_told_once_and_then_the_end(tmp_path: Path, receiver: Receiver, said: list[str]) -> None:
    writer = RunWriter(tmp_path).config()
    writer.clock -= 4000
    writer.attempt().steps(1, 3)
    watcher = Watcher(writer.run, Webhook(receiver.url), said.append, SOON)
    with hold_lock(writer.run.logs / "run.lock"):
        assert [watcher.look(), watcher.look()] == [("stalled", True)] * 2
        writer.clock += 1000
        writer.steps(4, 4)
        assert watcher.look() == ("stalled", True)
        writer.clock = time.time()
        writer.record("eval", global_step=4, accuracy=0.5, name="heldout", num_tasks=1)
        assert watcher.look() == ("running", True)
    writer.finish("completed", 4)
    assert watcher.look() == ("finished", True)
    assert [body["event"] for body in receiver.bodies] == ["stalled", "stalled", "completed"]
    assert all(body["seconds_since_last_record"] > 100 for body in receiver.bodies[:2])


@pytest.mark.parametrize("recorded", [5, 4005])
def test_suspended_is_not_stalled_and_a_stall_is_told_all_the_same(
    tmp_path: Path, receiver: Receiver, said: list[str], monkeypatch: pytest.MonkeyPatch, recorded: int
) -> None:
    """The machine is suspended for 4000 s between two looks; the last record comes before that, or after."""
    began = time.time()
    clock = SimpleNamespace(wall=began, awake=7.0)
    clocks = SimpleNamespace(time=lambda: clock.wall, monotonic=lambda: clock.awake)
    monkeypatch.setattr("clusterkit.observe.alerts.watch.time", clocks)
    writer = RunWriter(tmp_path).config()
    writer.clock -= 20
    writer.attempt().steps(1, 3)
    watcher = Watcher(writer.run, Webhook(receiver.url), said.append, SOON)

    def look_after(awake: float, suspended: float = 0.0) -> str:
        clock.wall += awake + suspended
        clock.awake += awake
        return watcher.look()[0]

    with hold_lock(writer.run.logs / "run.lock"):
        assert look_after(0) == "running"
        writer.clock = began + recorded
        writer.record("eval", global_step=3, accuracy=0.5, name="heldout", num_tasks=1)
        assert look_after(10, suspended=4000) == "running"
        assert look_after(45) == "running"
        assert look_after(18) == "stalled"
    (alert,) = receiver.bodies
    assert 60 < alert["seconds_since_last_record"] < 70


def test_watching_goes_on_after_a_failure_and_ends_with_the_run(tmp_path: Path, receiver: Receiver) -> None:
    writer = _failed(tmp_path)
    command = [sys.executable, "-m", "clusterkit.cli.main", "alerts", "--every", "0.1", "--fileroot", str(tmp_path)]
    process = subprocess.Popen(
        command, env={**os.environ, "CLUSTERKIT_WEBHOOK": receiver.url}, stderr=subprocess.PIPE, text=True
    )
    try:
        receiver.wait_for(1)
        writer.attempt(resume_step=3).steps(4, 30).finish("completed", 30)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert [body["event"] for body in receiver.bodies] == ["failed", "completed"]


def test_a_command_gets_the_json_and_its_failure_is_told(tmp_path: Path) -> None:
    _failed(tmp_path)
    seen = tmp_path / "seen.json"
    bad = _alerts("--once", "--fileroot", str(tmp_path), "--command", "no-such-program --now")
    assert bad.returncode == 1
    assert "no-such-program" in bad.stderr
    good = _alerts("--once", "--fileroot", str(tmp_path), "--command", f"sh -c 'cat > {seen}'")
    assert good.returncode == 0, good.stderr
    assert json.loads(seen.read_text())["event"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "CLUSTERKIT_WEBHOOK is not set"),
        (("--webhook", "file:/nonexistent/hook"), "cannot read"),
        (("--webhook", "slack"), "file:PATH"),
        (("--webhook", "env:HOME"), "https://"),
        (("--command", "'"), "--command"),
        (("--command", "true", "--webhook", "env:X"), "second watcher"),
    ],
)
def test_bad_usage_is_one_message(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    _failed(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "CLUSTERKIT_WEBHOOK"}
    done = run_clusterkit("alerts", "--fileroot", tmp_path, *arguments, env=environment)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_a_webhook_file_of_two_lines_is_refused_at_the_start(tmp_path: Path, receiver: Receiver) -> None:
    _failed(tmp_path)
    file = tmp_path / "webhook"
    file.touch(mode=0o600)
    for text in (f"{receiver.url}\n{receiver.url}x\n", f"{receiver.url} x", "https://[::1", f"{receiver.url}\x7f"):
        file.write_text(text)
        done = _alerts("--once", "--fileroot", str(tmp_path), "--webhook", f"file:{file}")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert SECRET not in done.stderr
    assert receiver.paths == []


def test_a_watcher_outlives_all_that_a_look_comes_upon(tmp_path: Path, said: list[str]) -> None:
    writer = _failed(tmp_path)
    seen = tmp_path / "seen.json"
    program = tmp_path / "tell"
    program.write_text(f"#!/bin/sh\ncat > {seen}\n")  # not executable
    watcher = Watcher(writer.run, Command((str(program),)), said.append, SOON)
    metrics = writer.run.metrics.read_bytes()

    def run_a_folder() -> None:
        writer.run.metrics.unlink()
        writer.run.metrics.mkdir()

    def mend() -> None:
        writer.run.metrics.rmdir()
        writer.run.metrics.write_bytes(
            metrics + b'{"kind": "step", "global_step": "x"}\n{"kind": "finish", "time": []}\n'
        )

    def finish() -> None:
        program.chmod(0o755)
        writer.run.metrics.write_bytes(metrics)
        writer.attempt(resume_step=3).steps(4, 30).finish("completed", 30)

    todo = iter([lambda: None, run_a_folder, lambda: None, mend, finish, lambda: None, lambda: None])
    assert watcher.watch(0.0, lambda _: next(todo)())
    assert json.loads(seen.read_text())["event"] == "completed"
    assert sum("tell cannot be run" in line for line in said) >= 1
    assert sum("cannot see the run for now (IsADirectoryError" in line for line in said) == 1, said


def test_a_webhook_that_no_request_can_be_made_of_is_not_delivered_and_nothing_more(
    tmp_path: Path, said: list[str]
) -> None:
    watcher = Watcher(_failed(tmp_path).run, Webhook(f"http://127.0.0.1:1{SECRET}\nx"), said.append, SOON)
    assert watcher.look() == ("failed", False)
    assert "cannot be reached: InvalidURL" in said[0]
    assert SECRET not in said[0]
