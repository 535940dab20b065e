"""The trainer's own servers on this machine: starts their hosts, or takes them over from an earlier attempt."""

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
from trainer.hf_folder import weights_digest
from trainer.paths import RunPaths
from trainer.placement import local_places, served_layers, served_rank, served_versions
from trainer.serving import registry
from trainer.serving.registry import Registration
from trainer.start_mark import digest_before

log = logging.getLogger("trainer")

CONFIG = "config.yaml"
END_SECONDS = 30.0
"""How long servers may take to end; then they are killed."""
LOOK_SECONDS = 1.0
GONE_SECONDS = 6.0
"""How long a server whose host was killed takes to end and free its GPU's memory (see engines/guard.py)."""
LONGEST_WAIT = 60.0
STEADY_SECONDS = 300.0
"""After so long a server, or its host, has started well, and its next death counts as the first."""


def config_file(config: RunConfig, folder: Path) -> Path:
    """Write the run's configuration beside its servers' registrations, where their hosts read it; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG
    write_atomic(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return path


def host_command(file: Path, model: Path, name: str, kept: bool, tied: bool) -> list[str]:
    """Command of a server's host without its GPUs and address. file: the run's configuration. kept, tied: options."""
    command = [sys.executable, "-m", registry.HOST_MODULE, str(file), "--model", str(model), "--name", name]
    return command + ["--kept"] * kept + ["--tied"] * tied


def placed(command: list[str], gpus: tuple[int, ...], address: str) -> list[str]:
    """Add to a host's command the GPUs, by number, and the address to listen on."""
    return [*command, "--gpus", "".join(f"{gpu}," for gpu in gpus), "--address", address]


def start_host(command: list[str], log: Path, tied: bool) -> subprocess.Popen[bytes]:
    """Start a host (see `host_command`). log: gets what it prints. tied: it ends with this process."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the trainer, which ends its servers itself
        )


class HostKeeper:
    """Starts hosts of servers on this machine and, while it watches them, restarts those that are killed.

    A host restarts its server itself, and registers when it gives up. Only a host that was killed cannot.
    """

    def __init__(self, folder: Path, restarts: int, start: Callable[[str], subprocess.Popen[bytes]]) -> None:
        self.folder, self.restarts, self._start = folder, restarts, start
        self.hosts: dict[str, subprocess.Popen[bytes] | None] = {}
        """By name; None where an earlier attempt has started the host."""
        self._killed: Counter[str] = Counter()  # soon after their start, in a row
        self._since: dict[str, float] = {}  # when each was started
        self._due: dict[str, float] = {}
        self._registered: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="servers' hosts", daemon=True)

    def keep(self, name: str, running: bool = False) -> None:
        """Keep the host of this name from now on; start it unless it is `running` already."""
        self.hosts[name], self._since[name] = None if running else self._start(name), time.monotonic()

    def watch(self) -> None:
        """Check the hosts in a thread until `close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop checking; no host is started afterwards."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Note hosts that were killed, and restart those whose waiting time is over."""
        now = time.monotonic()
        found = {one.name: one for one in registry.read(self.folder) if one.node == os.uname().nodename}
        for name in self.hosts:
            if name in self._due:
                if now >= self._due[name]:
                    del self._due[name]
                    self.hosts[name], self._since[name] = self._start(name), now
            elif how := self._how_killed(name, found.get(name)):
                self._killed[name] = 1 if now - self._since[name] > STEADY_SECONDS else self._killed[name] + 1
                if self._killed[name] > self.restarts:
                    log.error("engine server %s is given up: its host %s", name, how)
                    fresh = Registration(name, "", "", os.uname().nodename, 0, time.time(), "ended")
                    registry.write(
                        self.folder,
                        replace(found.get(name) or fresh, state="ended", url="", reason=f"its host {how}"),
                    )
                    continue
                wait = min(GONE_SECONDS * 2 ** (self._killed[name] - 1), LONGEST_WAIT)
                log.warning("the host of engine server %s %s: it is started again in %.0f s", name, how, wait)
                registry.remove(self.folder, name)
                self._due[name] = now + wait

    def _how_killed(self, name: str, one: Registration | None) -> str:
        """How a host was killed, in words; empty while it runs, and when it ended in order."""
        host = self.hosts[name]
        if one is not None:
            self._registered.add(one.pid)
            if one.state in ("leaving", "ended"):
                return ""
        if host is None:
            return "was killed" if one is not None and not one.host_runs() else ""
        if one is None and host.pid in self._registered:  # it was ended, and its registration removed
            return ""
        code = host.poll()
        if not code or -code in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            return ""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how} (log: {self.folder / name}.host.log)"

    def _run(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # such as a hiccup of the shared storage: the servers still need their keeper
                log.warning("the servers' hosts cannot be looked after: %s: %s", type(error).__name__, error)


class LocalServers:
    """The run's servers on this machine: starts those that are missing, when it is told to, and restarts killed ones.

    A context manager: at its end it ends them, unless they are to stay (servers.shutdown_on_exit).
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder = registry.folder_of(RunPaths.of(config).logs)
        self.kept = not config.serving.shutdown_on_exit
        self._places = {place.name: place for place in local_places(config)}
        self._keeper = HostKeeper(self.folder, config.serving.restarts, self._start)
        self._model: Path | None = None

    def start(self, model: Path) -> None:
        """Start the missing ones, the first time that it is called. model: folder of the weights."""
        if self._model is not None:
            return
        self._model = model
        for one in registry.read(self.folder):  # servers of mode=local listen for their own machine alone
            if one.name in self._places and not one.here:
                log.warning(
                    "%s was started on %s, where this machine cannot ask it: it is started here. Should it still run "
                    "there, end its host, process %d", one.name, one.node, one.pid,
                )  # fmt: skip
                registry.remove(self.folder, one.name)
        running = clear_dead(self.folder)
        if others := running & self._places.keys() & with_other_weights(self.config, model):
            end_hosts(self.folder, others)
            running -= others
        config_file(self.config, self.folder)
        for name in self._places:
            if name in running:
                log.info("%s is there already: it is used again", name)
            self._keeper.keep(name, running=name in running)
        self._keeper.watch()

    def __enter__(self) -> LocalServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.close()
        if self._model is not None and not self.kept:
            hosts = [host for host in self._keeper.hosts.values() if host is not None]
            for host in hosts:
                host.terminate()
            end_hosts(self.folder)
            for host in hosts:
                with suppress(subprocess.TimeoutExpired):
                    host.wait(END_SECONDS)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        assert self._model is not None
        command = host_command(self.folder / CONFIG, self._model, name, self.kept, tied=not self.kept)
        command = placed(command, self._places[name].gpus, "127.0.0.1")
        return start_host(command, self.folder / f"{name}.host.log", tied=not self.kept)


def clear_dead(folder: Path) -> set[str]:
    """Remove registrations whose host is gone, or which were given up; returns the names of the others."""
    alive = set()
    for one in registry.read(folder):
        if one.state == "ended" or not one.alive_here():
            registry.remove(folder, one.name)
        else:
            alive.add(one.name)
    return alive


def with_other_weights(config: RunConfig, model: Path) -> set[str]:
    """Names of the run's servers that an earlier attempt started with other weights than this one begins with.

    model: folder of these. Servers with those that the supervised start began with are given these as they join.
    """
    servers = registry.read(registry.folder_of(RunPaths.of(config).logs))
    if not servers:
        return set()
    wanted = served_rank(config), served_layers(config, model), served_versions(config)
    bases = {weights_digest(model), earlier_weights(config)} - {""}
    found = {one.name for one in servers if not any(one.serves(base, *wanted) for base in bases)}
    for name in sorted(found):
        log.warning("%s was started with other weights than those of %s, or for other adapters", name, model)
    return found


def earlier_weights(config: RunConfig) -> str:
    """Digest of the weights that the run's supervised start began with, where servers of these may be given its own.

    Empty without such a start, and where servers keep the weights that adapters belong to.
    """
    return "" if not config.supervised.dataset or served_rank(config) else digest_before(RunPaths.of(config))


def end_hosts(folder: Path, names: set[str] | None = None) -> list[str]:
    """End servers on this machine, all or those of `names`, and wait for their end; returns their names."""
    mine = [
        one
        for one in registry.read(folder)
        if one.node == os.uname().nodename and (names is None or one.name in names) and one.host_runs()
    ]
    for one in mine:
        with suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while any(one.host_runs() for one in mine) and time.monotonic() < deadline:
        time.sleep(0.05)
    for one in mine:
        if one.host_runs():
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        registry.remove(folder, one.name)
    return [one.name for one in mine]
