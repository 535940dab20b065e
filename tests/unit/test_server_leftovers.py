"""A host that was killed leaves processes of its server behind; the next host ends them before it starts its own.

Real hosts in real processes; a program in the engine's place starts a worker as engines do, in a session of its own.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import coin
import psutil
import pytest
from runs import ENVIRONMENT, REPOSITORY, Trial, wait_for

from trainer.serving import registry
from trainer.serving.keeper import HostKeeper, clear_dead, config_file, end_hosts, host_command, placed
from trainer.serving.orphan_processes import MARK, leftovers, mark

ENGINE = """#!{python}
# In an engine's place. Its worker outlives it, as one does that waits for a GPU.
import http.server, pathlib, subprocess, sys
folder = pathlib.Path({folder!r})
def runs(pid):
    try:
        return pathlib.Path(f"/proc/{{pid}}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
there = [int(path.name) for path in folder.glob("workers/*") if runs(path.name)]
print(f"starts beside {{there}}", flush=True)
worker = "import signal, time; signal.signal(15, signal.{what}); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", worker], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
(folder / "workers" / str(child.pid)).touch()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Hosts:
    """Starts hosts of a run's servers."""

    def __init__(self, folder: Path, what: str) -> None:
        engine = folder / "engine"
        (folder / "workers").mkdir()
        engine.write_text(ENGINE.format(python=sys.executable, folder=str(folder), what=what))
        engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
        trial = Trial(folder / "runs", folder / "cache", **coin.SETTINGS)
        trial.change(**{"servers.python": str(engine)})
        self.root, self.folder = folder, registry.folder_of(trial.paths.logs)
        self.file = config_file(trial.config, self.folder)
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 2}')
        (self.model / "model.safetensors").write_bytes(b"")
        self.started: list[psutil.Process] = []

    def start(self, name: str) -> psutil.Process:
        """Start a host and wait until its server answers."""
        command = placed(host_command(self.file, self.model, name, kept=False, tied=False), (), "127.0.0.1")
        with (self.root / f"{name}.host.log").open("ab") as log:
            host = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=log, stderr=log)
        self.started.append(psutil.Process(host.pid))

        def ready() -> bool:
            assert host.poll() is None, self.said(name)
            found = {one.name: one for one in registry.read(self.folder)}
            return name in found and (found[name].pid, found[name].state) == (host.pid, "ready")

        wait_for(ready)
        return self.started[-1]

    def worker(self, host: psutil.Process) -> psutil.Process:
        """The process that the server of a host has started."""
        (guard,) = host.children()
        (server,) = guard.children()
        (worker,) = server.children()
        return worker

    def said(self, name: str) -> str:
        logs = (self.folder / f"{name}.log", self.root / f"{name}.host.log")
        return "".join(log.read_text() for log in logs if log.exists())


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(tmp_path, getattr(request, "param", "SIG_DFL"))
    yield made
    for host in made.started:
        with suppress(psutil.NoSuchProcess):
            host.send_signal(signal.SIGTERM)
            host.wait(30)
    for pid in [int(path.name) for path in tmp_path.glob("workers/*")]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("hosts", ["SIG_DFL", "SIG_IGN"], indirect=True)
def test_what_a_killed_host_left_is_ended_before_the_next_server_starts(hosts: Hosts) -> None:
    first, other = hosts.start("server-0"), hosts.start("server-1")
    worker, others = hosts.worker(first), hosts.worker(other)
    (guard,) = first.children()
    stranger = subprocess.Popen(SLEEP, env={**os.environ, **mark(hosts.folder / "of another run", "server-0")})
    assert leftovers(hosts.folder, "server-0") == []  # all of it belongs to a host that runs

    guard.suspend()  # so that it cannot end anything before it is killed, too: the kernel ends the server alone
    first.kill()
    guard.kill()
    wait_for(lambda: leftovers(hosts.folder, "server-0") == [worker.pid])
    assert alive(worker)
    again = hosts.start("server-0")

    assert not alive(worker)
    assert hosts.said("server-0").count(f"starts beside [{others.pid}]") == 1
    assert f"processes of its earlier host are still there and are ended: {worker.pid}" in hosts.said("server-0")
    assert alive(hosts.worker(again))
    assert alive(others)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_server_that_hangs_is_killed_and_started_again_when_its_host_is_asked(hosts: Hosts) -> None:
    host = hosts.start("server-0")
    (guard,), worker = host.children(), hosts.worker(host)
    (server,) = guard.children()
    for process in (worker, server, guard):  # deaf to SIGTERM, all of them
        process.suspend()
    (one,) = registry.read(hosts.folder)
    registry.ask_restart(hosts.folder, one, "it hangs")

    def again() -> bool:
        found = registry.read(hosts.folder)
        return [(o.state, o.starts, o.pid) for o in found] == [("ready", 2, host.pid)]

    wait_for(again)
    assert not any(alive(process) for process in (worker, server, guard))
    assert "server-0: it hangs; starting it again in 1 s" in hosts.said("server-0")
    (now,) = registry.read(hosts.folder)
    assert registry.restart_reason(hosts.folder, now) == ""
    assert alive(hosts.worker(host))


def test_a_host_that_ends_in_order_leaves_nothing(hosts: Hosts) -> None:
    host = hosts.start("server-0")
    (guard,) = host.children()
    assert f"{MARK}={hosts.folder / 'server-0'}" in Path(f"/proc/{guard.pid}/environ").read_text().split("\0")
    host.terminate()
    host.wait(30)
    assert registry.read(hosts.folder) == []


def test_a_host_of_another_run_that_got_the_number_of_a_dead_one_is_left_alone(tmp_path: Path) -> None:
    """As after a restart of the machine, where numbers are given anew."""
    others = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", registry.HOST_MODULE])
    try:
        wait_for(lambda: registry.process_runs(others.pid))
        own = registry.Registration("server-0", "vllm", "m", os.uname().nodename, others.pid, 0.0, "ready")
        for born, living in ((registry.birth_of(others.pid), {"server-0"}), (1, set())):
            registry.write(tmp_path, replace(own, born=born))
            assert clear_dead(tmp_path) == living
        registry.write(tmp_path, replace(own, born=1))
        assert end_hosts(tmp_path) == []
        assert others.poll() is None
    finally:
        others.kill()
        others.wait()


@pytest.mark.parametrize(("steady", "starts"), [(301.0, 5), (299.0, 3)])
def test_a_host_that_is_killed_once_a_week_is_not_given_up(
    steady: float, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, started = 0.0, list[subprocess.Popen[bytes]]()
    monkeypatch.setattr("trainer.serving.keeper.time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))

    def start(_: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sh", "-c", "kill -9 $$"]))
        started[-1].wait()
        return started[-1]

    keeper = HostKeeper(tmp_path, restarts=2, start=start)
    keeper.keep("server-0")
    for _ in range(4):
        now += steady
        keeper.look()
        now += 60.0  # the longest wait
        keeper.look()
    assert len(started) == starts
    given_up = [one.reason for one in registry.read(tmp_path) if one.state == "ended"]
    assert given_up == ([] if starts == 5 else [f"its host was ended by SIGKILL (log: {tmp_path}/server-0.host.log)"])
