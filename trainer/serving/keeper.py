"""The trainer's own servers on this machine: hosts that are started, taken over from an earlier attempt, and ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import yaml

from trainer.config import RunConfig
from trainer.files import write_atomic
from trainer.paths import RunPaths
from trainer.placement import local_places
from trainer.serving import registry
from trainer.serving.registry import Registration

log = logging.getLogger("trainer")

CONFIG = "config.yaml"
END_SECONDS = 30.0
"""So long the servers may take to end; then they are killed."""
LOOK_SECONDS = 1.0
GONE_SECONDS = 6.0
"""So long after its host was killed a server has ended, too, and given its GPU's memory back (see engines/guard.py)."""
LONGEST_WAIT = 60.0


def config_file(config: RunConfig, folder: Path) -> Path:
    """The run's resolved configuration beside its servers' registrations, where their hosts read it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    write_atomic(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return path


def host_command(file: Path, model: Path, name: str, kept: bool, tied: bool) -> list[str]:
    """The command of a server's host, but for its place. file: the run's configuration. kept, tied: see its options."""
    command = [sys.executable, "-m", registry.HOST_MODULE, str(file), "--model", str(model), "--name", name]
    return command + ["--kept"] * kept + ["--tied"] * tied


def placed(command: list[str], gpus: tuple[int, ...], address: str) -> list[str]:
    """The command of a host of one server with its place: GPUs by number and the address to listen on."""
    return [*command, "--gpus", "".join(f"{gpu}," for gpu in gpus), "--address", address]


def start_host(command: list[str], log: Path, tied: bool) -> subprocess.Popen[bytes]:
    """Start a host (see `host_command`). log: gets what it prints. tied: it ends with us."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends its servers itself
        )


class HostKeeper:
    """Starts hosts of servers on this machine and, while it watches them, starts those again that are killed.

    A host starts its server again itself and says when it gives up; only a host that was killed can do neither.

    Args:
        folder: of the registrations. restarts: how often each is started again. start: starts the host of a name.

    """

    def __init__(self, folder: Path, restarts: int, start: Callable[[str], subprocess.Popen[bytes]]) -> None:
        self.folder, self.restarts, self._start = folder, restarts, start
        self.hosts: dict[str, subprocess.Popen[bytes] | None] = {}
        """By name; None for one that an earlier attempt has started."""
        self._killed: Counter[str] = Counter()
        self._due: dict[str, float] = {}
        self._registered: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servers' hosts", daemon=True)

    def keep(self, name: str, there: bool = False) -> None:
        """Start the host of this name, unless it is there already, and see to it from now on."""
        self.hosts[name] = None if there else self._start(name)

    def watch(self) -> None:
        """Look after the hosts, in a thread, until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Start nothing any more."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Note who was killed, and start those again whose time has come."""
        now = time.monotonic()
        found = {one.name: one for one in registry.read(self.folder) if one.node == os.uname().nodename}
        for name in self.hosts:
            if name in self._due:
                if now >= self._due[name]:
                    del self._due[name]
                    self.hosts[name] = self._start(name)
            elif how := self._how_killed(name, found.get(name)):
                self._killed[name] += 1
                if self._killed[name] > self.restarts:
                    log.error("engine server %s is given up: its host %s", name, how)
                    registry.write(self.folder, self._given_up(name, found.get(name), f"its host {how}"))
                    continue
                wait = min(GONE_SECONDS * 2 ** (self._killed[name] - 1), LONGEST_WAIT)
                log.warning("the host of engine server %s %s: it is started again in %.0f s", name, how, wait)
                registry.remove(self.folder, name)
                self._due[name] = now + wait

    def _how_killed(self, name: str, one: Registration | None) -> str:
        """How a host ended that was not asked to, in words; empty when it runs, or has ended in order."""
        host = self.hosts[name]
        if one is not None:
            self._registered.add(one.pid)
            if one.state in ("leaving", "ended"):
                return ""
        if host is None:
            return "was killed" if one is not None and not registry.process_runs(one.pid) else ""
        if one is None and host.pid in self._registered:  # somebody has ended it and taken the registration away
            return ""
        code = host.poll()
        if not code or -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how} (log: {self.folder / name}.host.log)"

    def _given_up(self, name: str, one: Registration | None, reason: str) -> Registration:
        fresh = Registration(name, "", "", os.uname().nodename, 0, time.time(), "ended")
        return replace(one or fresh, state="ended", url="", reason=reason)

    def _run(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # the shared storage stutters; whatever it is, servers need their keeper
                log.warning("the servers' hosts cannot be looked after: %s: %s", type(error).__name__, error)


class LocalServers:
    """Starts what the run wants and is not there yet; a context manager that ends what does not stay.

    Hosts that are killed while it lasts are started again. model: folder of the weights to start with.
    """

    def __init__(self, config: RunConfig, model: Path) -> None:
        self.config, self.model = config, model
        self.folder = registry.folder_of(RunPaths.of(config).logs)
        self.kept = not config.serving.shutdown_on_exit
        self._places = {place.name: place for place in local_places(config)}
        self._keeper = HostKeeper(self.folder, config.serving.restarts, self._start)

    def __enter__(self) -> LocalServers:
        there = clear_dead(self.folder)
        config_file(self.config, self.folder)
        for name in self._places:
            if name in there:
                log.info("%s is there already: it is used again", name)
            self._keeper.keep(name, there=name in there)
        self._keeper.watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()
        if not self.kept:
            hosts = [host for host in self._keeper.hosts.values() if host is not None]
            for host in hosts:
                host.terminate()
            end_hosts(self.folder)
            for host in hosts:
                with suppress(subprocess.TimeoutExpired):
                    host.wait(END_SECONDS)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        command = host_command(self.folder / CONFIG, self.model, name, self.kept, tied=not self.kept)
        command = placed(command, self._places[name].gpus, "127.0.0.1")
        return start_host(command, self.folder / f"{name}.host.log", tied=not self.kept)


def clear_dead(folder: Path) -> set[str]:
    """Forget servers of this machine whose host has gone, or that were given up. Returns the names of the others."""
    alive = set()
    for one in registry.read(folder):
        if one.state == "ended" or not one.alive_here():
            registry.remove(folder, one.name)
        else:
            alive.add(one.name)
    return alive


def end_hosts(folder: Path, names: set[str] | None = None) -> list[str]:
    """End the servers on this machine, all or those named, and wait for that. Returns the names of those it ended."""
    mine = [
        one
        for one in registry.read(folder)
        if one.node == os.uname().nodename and (names is None or one.name in names) and registry.process_runs(one.pid)
    ]
    for one in mine:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while any(registry.process_runs(one.pid) for one in mine) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in mine:
        if registry.process_runs(one.pid):
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        registry.remove(folder, one.name)
    return [one.name for one in mine]
