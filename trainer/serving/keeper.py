"""The trainer's own servers on this machine: hosts that are started, taken over from an earlier attempt, and ended."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import yaml

from trainer.config import RunConfig
from trainer.files import write_atomic
from trainer.paths import RunPaths
from trainer.serving import registry
from trainer.serving.wanted import Place, local_places

log = logging.getLogger("trainer")

END_SECONDS = 30.0
"""So long the servers may take to end; then they are killed."""


def config_file(config: RunConfig, folder: Path) -> Path:
    """The run's resolved configuration beside its servers' registrations, where their hosts read it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    write_atomic(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return path


def host_command(file: Path, model: Path, place: Place, address: str, kept: bool, tied: bool) -> list[str]:
    """The command of a server's host. file: the run's configuration. kept, tied: see `python -m trainer.serving`."""
    command = [sys.executable, "-m", registry.HOST_MODULE, str(file), "--model", str(model)]
    command += ["--name", place.name, "--gpus", ",".join(map(str, place.gpus)), "--address", address]
    return command + ["--kept"] * kept + ["--tied"] * tied


class LocalServers:
    """Starts what the run wants and is not there yet; a context manager that ends what does not stay.

    model: folder of the weights to start with.
    """

    def __init__(self, config: RunConfig, model: Path) -> None:
        self.config, self.model = config, model
        self.folder = registry.folder_of(RunPaths.of(config).logs)
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalServers:
        there = clear_dead(self.folder)
        kept = not self.config.servers.shutdown_on_exit
        file = config_file(self.config, self.folder)
        for place in local_places(self.config):
            if place.name in there:
                log.info("%s is there already: it is used again", place.name)
                continue
            with (self.folder / f"{place.name}.host.log").open("ab") as output:
                self._hosts[place.name] = subprocess.Popen(
                    host_command(file, self.model, place, "127.0.0.1", kept, tied=not kept),
                    stdin=subprocess.DEVNULL if kept else subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the trainer, which ends its servers itself
                )
        return self

    def __exit__(self, *_: object) -> None:
        if self.config.servers.shutdown_on_exit:
            end_hosts(self.folder)
            for process in self._hosts.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)

    def ended(self) -> dict[str, int]:
        """Exit codes of the hosts that have ended, by the server's name."""
        return {name: code for name, host in self._hosts.items() if (code := host.poll()) is not None}


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
